"""What of a reply is settled while its tokens are still sampled."""

from collections.abc import Sequence

from msgspec.structs import replace

from forgemq_contracts.episodes import OpenedEpisode
from forgemq_gateway.core.replies import Reply
from forgemq_gateway.core.requests import Call, Request, Text, Thinking

_INCOMPLETE = "\ufffd"
"""What a decoder gives for the first bytes of a character."""


def is_live(request: Request, opened: OpenedEpisode) -> bool:
    """Whether the answer is streamed while it is sampled: one choice, without facts of tokens."""
    is_alone = request.n == 1 and len(request.prompts) <= 1
    has_facts = request.wants_logprobs or request.returns_ids
    return opened.stream == "live" and request.is_stream and is_alone and not has_facts


def settled(replies: Sequence[Reply], *, stops: Sequence[str], marks: Sequence[str] = ()) -> Reply:
    """The beginning that no continuation changes.

    Args:
        replies: The tokens so far as they are read with each continuation behind them.
        stops: Strings that may end the output; the text ends before them.
        marks: Texts that the parser takes out, with the blanks before them.
    """
    parts: list[Text | Thinking] = []
    for alike in zip(*(reply.parts for reply in replies), strict=False):
        first = alike[0]
        if isinstance(first, Call) or any(type(part) is not type(first) for part in alike):
            break
        texts = [part.text for part in alike if not isinstance(part, Call)]
        common = _common(texts)
        known = before_stops(common.rstrip(_INCOMPLETE), marks)
        # What comes may be a blank or a mark, and the parser takes out the blanks before both.
        text = before_stops(known if known == common else known.rstrip(), stops)
        if text:
            parts.append(replace(first, text=text))
        if any(each != text for each in texts):
            break
    return Reply(parts=tuple(parts))


def continues(reply: Reply, written: Reply) -> bool:
    """Whether the reply begins with what was written; the last part of that may have grown."""
    if len(reply.parts) < len(written.parts):
        return False
    last = len(written.parts) - 1
    for index, (before, now) in enumerate(zip(written.parts, reply.parts, strict=False)):
        if type(before) is not type(now):
            return False
        if isinstance(before, Call) or isinstance(now, Call):
            is_same = before == now
        else:
            grows = index == last and now.text.startswith(before.text)
            is_same = grows or now.text == before.text
        if not is_same:
            return False
    return True


def _common(texts: Sequence[str]) -> str:
    """The longest text that all of them begin with."""
    low, high = min(texts), max(texts)
    differing = (n for n, (a, b) in enumerate(zip(low, high, strict=False)) if a != b)
    return low[: next(differing, len(low))]


def before_stops(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string, or to what may be the beginning of one."""
    end = len(text)
    for stop in stops:
        found = text.find(stop)
        if found >= 0:
            end = min(end, found)
            continue
        begun = next(
            (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0
        )
        end = min(end, len(text) - begun)
    return text[:end]
