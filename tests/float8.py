"""float8_e4m3fn from its definition, as tables of numbers; the product converts with torch."""

import numpy as np

TABLE = np.array(
    [
        (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) if code >= 8 else code / 8 * 2.0**-6
        for code in range(127)
    ]
)
"""By code, the magnitudes: a sign, 4 bits of exponent with bias 7 and 3 of mantissa; 127 is NaN."""


def codes(values: np.ndarray) -> np.ndarray:
    """The nearest 8-bit float of each value as its byte; of two as near, the even one."""
    magnitudes = np.abs(values).astype(np.float64)
    above = np.clip(np.searchsorted(TABLE, magnitudes), 1, len(TABLE) - 1)
    low, high = TABLE[above - 1], TABLE[above]
    is_even = above % 2 == 0
    takes_high = (high - magnitudes < magnitudes - low) | (
        (high - magnitudes == magnitudes - low) & is_even
    )
    found = np.where(takes_high, above, above - 1).astype(np.uint8)
    return np.where(np.signbit(values), found | 0x80, found).astype(np.uint8)


def nearest(values: np.ndarray) -> np.ndarray:
    """The nearest 8-bit float of each value."""
    return np.copysign(TABLE[codes(values) & 0x7F], values)
