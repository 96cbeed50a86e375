"""What the regular expressions of a run's file ask for, in words."""

import re
from collections.abc import Mapping

_WORDS: Mapping[str, str] = {
    r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*)?$": "must be module:function",
    r"^(success_band|age|hardest_first|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$": (
        "must be success_band, age, hardest_first or module:function"
    ),
    r"^[a-z0-9_]{1,40}$": "must be 1 to 40 of a-z, 0-9 and _",
    r"^[a-z0-9-]{1,40}$": "must be 1 to 40 of a-z, 0-9 and -",
    r"^https?://[^\s/]+(/[^\s]*)?$": "must be an address that begins with http:// or https://",
    r"^[0-9a-f]{64}$": "must be 64 of 0-9 and a-f",
}
_REFUSED = re.compile(r"^Expected `str` matching regex (?P<pattern>'.*')$", re.DOTALL)


def in_words(rule: str) -> str:
    """A rule of msgspec; words in place of a regular expression."""
    refused = _REFUSED.match(rule)
    if refused is None:
        return rule
    return next((words for each, words in _WORDS.items() if repr(each) == refused["pattern"]), rule)
