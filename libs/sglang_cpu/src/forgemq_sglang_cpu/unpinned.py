"""Calls functions of SGLang that pin memory on a machine that cannot."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def leave_unpinned(original: Callable[..., object], *args: object, **arguments: object) -> object:
    """Call a function, and leave in plain memory what it asks torch to pin; a hook around it."""
    with _Unpinned():
        return original(*args, **arguments)


class _Unpinned(TorchFunctionMode):
    def __torch_function__(  # type: ignore[no-untyped-def]  # torch's types are as loose
        self,
        func,  # noqa: ANN001
        types,  # noqa: ANN001
        args=(),  # noqa: ANN001
        kwargs=None,  # noqa: ANN001
    ) -> Any:  # noqa: ANN401
        del types
        if func is torch.Tensor.pin_memory:
            return args[0]
        kept = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*args, **kept)
