"""Weights as 8-bit floats with a scale for each block of 128 rows and 128 columns.

The format of DeepSeek-V3's checkpoints, which SGLang and transformers read: a projection's weight
is float8_e4m3fn, and `<name>_scale_inv` has what each block is multiplied with.
"""

from forgemq_fp8_blocks.config import has_fp8_blocks
from forgemq_fp8_blocks.folder import add_quantised, quantise_model
from forgemq_fp8_blocks.plan import NothingToQuantiseError
from forgemq_fp8_blocks.values import BLOCK, dequantised, quantised

__all__ = [
    "BLOCK",
    "NothingToQuantiseError",
    "add_quantised",
    "dequantised",
    "has_fp8_blocks",
    "quantise_model",
    "quantised",
]
