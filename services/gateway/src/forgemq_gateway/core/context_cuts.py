"""What an agent says about the context of its request, in a header beside the body."""

from collections.abc import Collection, Mapping

import msgspec

from forgemq_contracts.context_cuts import (
    CONTEXT_HEADER,
    CONTEXT_HEADER_BYTES_MAX,
    CUTS_MAX,
    ContextCut,
)
from forgemq_gateway.core.errors import invalid

_CUTS = msgspec.json.Decoder(tuple[ContextCut, ...])


def told_cuts(headers: Mapping[str, str], *, known: Collection[str]) -> tuple[ContextCut, ...]:
    """The cuts before a request; () for an agent that says nothing.

    Args:
        headers: Of the request, by name in lower case.
        known: Ids of the episode's completions.

    Raises:
        RefusedError: 400: the header breaks a rule; nothing of the request was taken.
    """
    told = headers.get(CONTEXT_HEADER)
    if told is None:
        return ()
    if len(told) > CONTEXT_HEADER_BYTES_MAX:
        raise _wrong(f"must have at most {CONTEXT_HEADER_BYTES_MAX} bytes, got {len(told)}")
    try:
        cuts = _CUTS.decode(told)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise _wrong(f"must be a JSON array of context cuts: {error}") from error
    if len(cuts) > CUTS_MAX:
        raise _wrong(f"must have at most {CUTS_MAX} cuts, got {len(cuts)}")
    for cut in cuts:
        if cut.after_id is not None and cut.after_id not in known:
            raise _wrong(f"names {cut.after_id}, which is no completion of this episode")
    return cuts


def _wrong(rule: str) -> Exception:
    return invalid(f"{CONTEXT_HEADER}: {rule}", param=CONTEXT_HEADER)
