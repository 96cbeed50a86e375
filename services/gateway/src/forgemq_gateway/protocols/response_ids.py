"""Ids of responses and their items: each names the request that it answers."""

from typing import Literal, TypeAlias

ItemKind: TypeAlias = Literal["rs", "msg", "fc"]

_RESPONSE = "resp_"
_KINDS = ("rs_", "msg_", "fc_")


def response_id(request_id: str) -> str:
    """The id of the response to this request."""
    return f"{_RESPONSE}{request_id}"


def response_answered(response: str) -> str:
    """The request that this response answers; "" if the gateway gave out no such id."""
    return response.removeprefix(_RESPONSE) if response.startswith(_RESPONSE) else ""


def item_id(kind: ItemKind, request_id: str, index: int) -> str:
    """The id of the item at this place of a reply."""
    return f"{kind}_{request_id}_{index}"


def answered_by(item: str) -> str:
    """The request whose reply has the item with this id; "" if the gateway gave out no such id."""
    for prefix in _KINDS:
        if item.startswith(prefix):
            return item.removeprefix(prefix).rpartition("_")[0]
    return ""
