"""Counts what an object holds, so that a test can say that something does not grow."""

import gc
import types
from typing import Any

_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def held_objects(root: Any) -> int:
    """Objects that can be reached from this one, without classes, functions and modules."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        each = waiting.pop()
        if id(each) not in seen and not isinstance(each, _SHARED):
            seen.add(id(each))
            waiting += gc.get_referents(each)
    return len(seen)
