"""What a parsed tool call gives an agent, and what unusual content makes its parser raise."""

import msgspec
from renderers.base import ParsedToolCall, ToolCallParseStatus

# Calls that an agent can be given; that of an unknown tool too, which the agent answers itself.
_USABLE = frozenset({ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL})

# Raised by templates, tokenizers and the parsers of `renderers` for unusual content: brackets
# nested too deep for the JSON parser (RecursionError), integers of over 4300 digits (ValueError),
# half a surrogate pair (TypeError), a list instead of an object (the others). The policy may sample
# anything, and a client may send anything.
CONTENT_ERRORS = (RecursionError, ValueError, TypeError, LookupError, AttributeError)


def arguments_text(call: ParsedToolCall) -> str | None:
    """The call's arguments as JSON text; None if the call is malformed."""
    if call.status not in _USABLE or not isinstance(call.name, str) or not call.name:
        return None
    given = call.arguments
    try:
        call.name.encode()
        if isinstance(given, str):
            msgspec.json.decode(given)
            return given
        return msgspec.json.encode(given if given is not None else {}).decode()
    except (msgspec.DecodeError, *CONTENT_ERRORS):
        return None
