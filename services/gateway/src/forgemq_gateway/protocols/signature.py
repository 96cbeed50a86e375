"""What clients send back with the model's reasoning, byte for byte: the request it answered."""

from base64 import b64decode, b64encode
from binascii import Error as Base64Error

_OURS = "forgemq:"


def signature_of(request_id: str) -> str:
    """The signature, or encrypted content, of the reasoning in this request's reply."""
    return b64encode(f"{_OURS}{request_id}".encode()).decode()


def signed_request(signature: str) -> str:
    """The request id in a signature of ours; "" in any other."""
    try:
        text = b64decode(signature, validate=True).decode()
    except (Base64Error, ValueError):
        return ""
    return text.removeprefix(_OURS) if text.startswith(_OURS) else ""
