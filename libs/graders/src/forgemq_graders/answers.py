"""What the policy answered: the text of its last completion, and the code in it."""

import re
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from forgemq_contracts.grading import GradingEpisode

AsyncOutcome: TypeAlias = Callable[[GradingEpisode], Coroutine[Any, Any, float]]
"""What the ready outcome graders are: named in a run file, or called by a function of the user."""

ANSWER_CHARACTERS_MAX = 65_536
"""Of an answer that a grader reads, from its end: a longer one is cut, whatever it says before."""

# A fence is three or more of one mark at the start of a line; the same closes it.
_FENCED = re.compile(r"^(`{3,}|~{3,})[^\n`]*\n(.*?)(?:^\1[^\n]*$|\Z)", re.DOTALL | re.MULTILINE)


def answer_text(episode: GradingEpisode) -> str:
    """The content of the last completion without its reasoning; "" if there is none."""
    if not episode.completions:
        return ""
    content = episode.completions[-1].message.get("content")
    if not isinstance(content, str):
        return ""
    return plain(content)


def plain(text: str) -> str:
    """The end of a text, as a process or a server can be sent it."""
    return text_of(text[-ANSWER_CHARACTERS_MAX:])


def text_of(characters: str) -> str:
    """These characters, with a question mark for each half of a surrogate pair: it is no text."""
    return characters.encode(errors="replace").decode()


def answer_code(episode: GradingEpisode) -> str:
    """The last fenced block of the answer, or the answer if it has none."""
    text = answer_text(episode)
    blocks = [match.group(2) for match in _FENCED.finditer(text)]
    return blocks[-1] if blocks else text
