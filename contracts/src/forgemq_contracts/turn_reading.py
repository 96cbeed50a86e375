"""What a turn's client asked that decides how its output is read.

Gateway, graders and exports decide with these functions, so that all of them read in an output what
the client got.
"""

from typing import Any

import msgspec
from msgspec import Struct

from forgemq_contracts.completions import TurnPart


class _Asked(Struct):
    tool_choice: Any = None
    store: Any = None


def parses_tools(part: TurnPart) -> bool:
    """Whether what looks like a call in the output is one."""
    return _asked(part).tool_choice not in ("none", {"type": "none"})


def is_raw(part: TurnPart) -> bool:
    """Whether the output is text as it stands, which no template gave a form."""
    return part.protocol == "completions"


def may_be_referred_to(part: TurnPart) -> bool:
    """Whether a later request may continue from this one by its id alone."""
    return part.protocol == "responses" and _asked(part).store is not False


def _asked(part: TurnPart) -> _Asked:
    return msgspec.json.decode(part.asked, type=_Asked) if part.asked else _Asked()
