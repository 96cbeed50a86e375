"""Whether messages quote an answer of the policy, as those do that begin with its summary."""

from collections.abc import Iterable, Sequence

from forgemq_gateway.core.requests import RequestMessage, text_of

# Shorter lines, such as headings and names of files, stand in texts that quote nobody.
_LINE_CHARACTERS_MIN = 24
_TEXT_CHARACTERS_MIN = 12
_LINES_LOOKED_FOR = 16
_LINES_ENOUGH = 3
# About 60,000 tokens: agents cut the context because less than that is left.
_CHARACTERS_SEARCHED_MAX = 256 * 1024


def quote(messages: Iterable[RequestMessage], answer: str) -> bool:
    """Whether one of the messages, not by the policy or a tool, has what the answer says.

    Agents take their tags and preliminaries out of a summary, so some of its longest lines are
    enough; a short answer must be there whole.
    """
    wanted = _wanted(answer)
    if not wanted:
        return False
    enough = min(_LINES_ENOUGH, len(wanted))
    left = _CHARACTERS_SEARCHED_MAX
    for message in messages:
        if message.role in ("assistant", "tool", "function"):
            continue
        text = text_of(message)[:left]
        left -= len(text)
        if sum(line in text for line in wanted) >= enough:
            return True
    return False


def _wanted(answer: str) -> Sequence[str]:
    """The longest lines of an answer; all of it if every line is short."""
    lines = {line.strip() for line in answer.splitlines()}
    long = sorted((each for each in lines if len(each) >= _LINE_CHARACTERS_MIN), key=len)
    if long:
        return long[-_LINES_LOOKED_FOR:]
    whole = answer.strip()
    return [whole] if len(whole) >= _TEXT_CHARACTERS_MIN else []
