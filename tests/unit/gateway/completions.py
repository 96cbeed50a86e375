"""Completions of one history, for tests of the core."""

from forgemq_contracts.arrays import pack_ids
from forgemq_gateway.core.digests import EMPTY_PATH, message_digest
from forgemq_gateway.core.history import History
from forgemq_gateway.core.known_completion import NO_OFFSET, KnownCompletion
from forgemq_gateway.core.replies import Reply
from forgemq_gateway.core.requests import Call, Text, Thinking


def user(text: str) -> str:
    return message_digest("user", text)


def completion_of(
    number: int,
    *,
    parent: KnownCompletion | None = None,
    shared: int = 0,
    context: list[int],
    output: list[int],
    text: str = "",
    thinking: str = "",
    calls: int = 0,
    after_offset: int = NO_OFFSET,
    engine_s: float = 0.0,
    alone_s: float | None = None,
    lane: int = 0,
    epoch: int = 1,
    weights: tuple[int, int] | None = (1, 4),
    taken_ms: int = 0,
) -> KnownCompletion:
    identifier = f"{number:032x}"
    return KnownCompletion(
        request_id=identifier,
        offset=number,
        sequence=number,
        parent=parent,
        shared_tokens=shared,
        context=pack_ids(context),
        output=pack_ids(output),
        context_tokens=shared + len(context),
        path=EMPTY_PATH,
        reply=Reply(
            parts=(
                *([Thinking(thinking)] if thinking else []),
                Text(text),
                *(Call(f"call_{identifier}_{n}", "find", "{}") for n in range(calls)),
            )
        ),
        tools_digest="",
        lane=lane,
        epoch=epoch,
        weights=weights,
        sampled_end="stop",
        engine_s=engine_s,
        alone_s=alone_s,
        cached_tokens=0,
        after_offset=after_offset,
        taken_ms=taken_ms,
        finished_ms=taken_ms,
        temperature=1.0,
    )


def add_first(history: History, completion: KnownCompletion, *messages: str) -> KnownCompletion:
    history.add(completion, keys=[user(text) for text in messages], after=EMPTY_PATH)
    return completion
