"""Values of user code as JSON: a number or array of numpy or torch as the numbers in it."""

from typing import Any

import msgspec


def in_json(value: object) -> bytes:
    """The value as JSON.

    Raises:
        TypeError, ValueError, RecursionError: JSON has no form for it.
    """
    return msgspec.json.encode(value, enc_hook=_numbers)


def _numbers(value: Any) -> Any:  # noqa: ANN401 - whatever user code made
    if not hasattr(value, "tolist"):
        raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")
    return value.tolist()
