"""Halves of surrogate pairs in JSON: what is left of an emoji that was cut in two.

Agents cut the output of tools at a number of UTF-16 units, and JavaScript and Python write such a
half as an escape. No text has one, and a body with one is no JSON to a strict reader. The gateway
reads each as U+FFFD, wherever it is; so do agents, in the result that a program leaves and in files
of tasks and conversations.
"""

import re

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

# Every escape is matched, so that the second of two backslashes begins none.
_ESCAPE = re.compile(
    rb"\\(?:u(?P<high>[dD][89abAB][0-9a-fA-F]{2})(?P<low>\\u[dD][c-fC-F][0-9a-fA-F]{2})?"
    rb"|u(?P<alone>[dD][c-fC-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)

_REPLACEMENT = rb"\ufffd"


def without_halves(body: bytes) -> bytes:
    r"""The body with \ufffd, the replacement character, for each half; it has the same length.

    A body without any comes back as it is.
    """
    if _SURROGATE.search(body) is None:
        return body
    return _ESCAPE.sub(_whole, body)


def _whole(escape: "re.Match[bytes]") -> bytes:
    is_half = escape["alone"] or (escape["high"] and not escape["low"])
    return _REPLACEMENT if is_half else escape[0]
