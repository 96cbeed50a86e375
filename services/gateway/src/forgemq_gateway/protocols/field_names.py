"""What the top-level fields of a protocol's body are for, and the request that follows from it."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw, Struct

from forgemq_gateway.core.digests import body_digest, digest_of
from forgemq_gateway.core.errors import invalid
from forgemq_gateway.core.requests import (
    DEFAULT_MODEL,
    MESSAGES_MAX,
    PARTS_MAX,
    KeyedMessages,
    ProtocolName,
    Request,
    canonical_tools,
    json_array,
)
from forgemq_gateway.protocols.json_body import NULL
from forgemq_gateway.protocols.reply_form import FormFields, demand_of

_WITHOUT_EFFECT = (NULL, Raw(b"{}"))


class FieldNames(Struct, frozen=True, kw_only=True):
    """The top-level fields of one protocol by what they are for.

    Attributes:
        asked: What a client may ask about sampling; recorded beside what was used.
        unused: What the episode decides in the client's place: the answer names them in a header.
        digested: What the messages or the way of delivery say: left out of the rest's digest.
    """

    protocol: ProtocolName
    asked: tuple[str, ...]
    unused: tuple[str, ...]
    digested: frozenset[str]

    def request(
        self,
        raw: Mapping[str, Raw],
        keyed: KeyedMessages,
        *,
        tools: tuple[dict[str, Any], ...],
        form: FormFields,
    ) -> Request:
        """The request of a body with these fields, but for its limits and its delivery.

        Args:
            raw: Every field of the body.
            keyed: What the model is to continue.
            tools: In chat form.
            form: The demanded form of the reply.

        Raises:
            RefusedError: 400: the form cannot be met, or the messages are too many.
        """
        _check_count(keyed)
        messages, digests = keyed.messages, keyed.keys
        rest = {name: bytes(value) for name, value in raw.items() if name not in self.digested}
        demand = demand_of(form, tools)
        unused = tuple(name for name in self.unused if raw.get(name, NULL) not in _WITHOUT_EFFECT)
        return Request(
            protocol=self.protocol,
            model=DEFAULT_MODEL,
            messages=messages,
            digests=digests,
            tools=tools,
            tools_json=json_array(tools) if tools else b"",
            tools_digest=digest_of(canonical_tools(tools)) if tools else "",
            body_digest=body_digest(self.protocol, digests, rest),
            asked=msgspec.json.encode({name: raw[name] for name in self.asked if name in raw}),
            form=demand.form,
            is_one_call=demand.is_one_call and bool(tools),
            unused=(*unused, "tool_choice") if demand.is_choice_unused else unused,
        )


def _check_count(keyed: KeyedMessages) -> None:
    """Refuse what would hold the event loop; one message of a body may be many of these."""
    if len(keyed.messages) > MESSAGES_MAX or keyed.part_count > PARTS_MAX:
        raise invalid(
            f"a request must have at most {MESSAGES_MAX} messages and results, and {PARTS_MAX} "
            "texts, calls and results in them",
            param="messages",
        )
