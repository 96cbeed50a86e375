"""Large requests leave the interpreter to the event loop."""

import gc
import json
import sys
import threading
from typing import Any

import pytest

from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.history import History
from forgemq_gateway.core.requests import MESSAGES_MAX
from forgemq_gateway.large_work import INLINE_SIZE_MAX, LargeWork, favour_event_loop
from forgemq_gateway.protocols import PROTOCOLS

USER = {"role": "user", "content": "hello"}
CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}


def test_modules_are_left_out_of_collections_and_threads_switch_within_a_millisecond() -> None:
    before_s = sys.getswitchinterval()
    gc.unfreeze()  # The test session's own modules, which are left frozen afterwards.
    try:
        favour_event_loop()
        assert gc.get_freeze_count() > 10_000
        assert round(sys.getswitchinterval(), 6) == 0.0002
    finally:
        gc.freeze()
        sys.setswitchinterval(before_s)


async def test_only_large_work_goes_to_a_thread() -> None:
    work = LargeWork("test")
    here = threading.get_ident()
    assert await work.run(threading.get_ident, size=INLINE_SIZE_MAX) == here
    assert await work.run(threading.get_ident, size=INLINE_SIZE_MAX + 1) != here


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.path)
@pytest.mark.parametrize(
    "field",
    [{"stop": ["a"] * 60_000}, {"logit_bias": {str(n): 1 for n in range(30_000)}}],
    ids=["stop", "logit_bias"],
)
def test_fields_beside_the_messages_are_refused_if_they_are_long(
    protocol: Any, field: dict[str, Any]
) -> None:
    with pytest.raises(RefusedError, match="at most 262144 bytes") as refused:
        protocol.read(json.dumps({"messages": [USER], **field}).encode(), History())
    assert refused.value.status == 400


def test_more_names_than_fields_have_are_refused_before_any_is_kept() -> None:
    names = {f"x{n}": 1 for n in range(30_000)}
    with pytest.raises(RefusedError, match="at most 262144 bytes"):
        PROTOCOLS[0].read(json.dumps({"messages": [USER], **names}).encode(), History())


def test_calls_are_refused_by_their_count_before_they_are_read() -> None:
    message = {"role": "assistant", "tool_calls": [{"no": "call"}] * (MESSAGES_MAX + 1)}
    with pytest.raises(RefusedError) as refused:
        PROTOCOLS[0].read(json.dumps({"messages": [USER, message]}).encode(), History())
    assert refused.value.param == "messages[1].tool_calls"


def test_a_wrong_call_is_refused_by_its_place() -> None:
    calls = [CALL, {"id": "d", "function": {"name": 5}}]
    body = {"messages": [USER, {"role": "assistant", "tool_calls": calls}]}
    with pytest.raises(RefusedError) as refused:
        PROTOCOLS[0].read(json.dumps(body).encode(), History())
    assert refused.value.param == "messages[1].tool_calls[1].function.name"
