"""Large requests leave the interpreter to the event loop."""

import gc
import sys
import threading

from forgemq_gateway.large_work import INLINE_SIZE_MAX, LargeWork, favour_event_loop


def test_modules_are_left_out_of_collections_and_threads_switch_within_a_millisecond() -> None:
    before_s = sys.getswitchinterval()
    try:
        favour_event_loop()
        assert gc.get_freeze_count() > 10_000
        assert round(sys.getswitchinterval(), 6) == 0.001
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before_s)


async def test_only_large_work_goes_to_a_thread() -> None:
    work = LargeWork("test")
    here = threading.get_ident()
    assert await work.run(threading.get_ident, size=INLINE_SIZE_MAX) == here
    assert await work.run(threading.get_ident, size=INLINE_SIZE_MAX + 1) != here
