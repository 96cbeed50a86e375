"""Starts SGLang's processes as copies of the one that has imported SGLang.

By default SGLang starts each as a new Python, which imports SGLang again. A copy imports nothing
and shares the memory of what was imported. A process that has used a GPU cannot be copied, so
engines on CPUs alone are started like this. Measured: `make load NAME=engine_start`.
"""

import gc
import multiprocessing
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def launch(original: Callable[..., T], *args: object, **arguments: object) -> T:
    """Call a function that starts processes, so that each is a copy of this process."""
    # The collector writes to every object that it looks at, which would copy the object's page.
    gc.freeze()
    method = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    try:
        return original(*args, **arguments)
    finally:
        multiprocessing.set_start_method(method, force=True)
