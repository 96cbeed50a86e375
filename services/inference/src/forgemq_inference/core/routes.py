"""Expert routes of a completion: from the engine's answer to the bytes of its record.

SGLang keeps, for each token of a request, the experts of its newest pass over that token, and
returns them as int32[tokens, layers, top_k] from a first token up to the last but one: no token
follows the last. From the last token of the context on that is one row for each sampled token,
of the pass that sampled it.

A pass is newer than the sampling one where the engine retracted the request, for new weights or
for memory: it then computed context and output so far anew. What follows was sampled on that.
"""

from msgspec import Struct

from forgemq_contracts.rules import EXPERT_BYTES

_RECORDED_BYTES = 4  # int32, little-endian


class InvalidRoutesError(ValueError):
    """What the engine recorded is not of this model or this output; says how."""


class Experts(Struct, frozen=True, kw_only=True):
    """The mixture of experts in a model.

    Attributes:
        layers: All layers of the model; each has a router (the engine knows no other mixtures).
        top_k: Experts that run for each token and layer.
    """

    layers: int
    top_k: int


def packed_routes(recorded: bytes, *, tokens_count: int, experts: Experts) -> bytes:
    """Routes of a completion as the record has them: int16[tokens, layers, top_k].

    Args:
        recorded: int32[tokens, layers, top_k], little-endian, as the engine returned it.
        tokens_count: sampled tokens.
        experts: of the model.

    Raises:
        InvalidRoutesError: not that many values, or one that is no expert.
    """
    expected_bytes = tokens_count * experts.layers * experts.top_k * _RECORDED_BYTES
    if len(recorded) != expected_bytes:
        raise InvalidRoutesError(
            f"routes: {len(recorded)} bytes, where {tokens_count} tokens, {experts.layers} layers "
            f"and {experts.top_k} experts make {expected_bytes}"
        )
    # Bytes and not numbers: a long completion has millions, and the event loop waits meanwhile.
    low, high = recorded[0::_RECORDED_BYTES], recorded[1::_RECORDED_BYTES]
    above = recorded[2::_RECORDED_BYTES] + recorded[3::_RECORDED_BYTES]
    if above.count(0) != len(above) or not high.isascii():
        raise InvalidRoutesError("routes: an expert is no int16 of 0 or more")
    narrow = bytearray(EXPERT_BYTES * len(low))
    narrow[0::EXPERT_BYTES], narrow[1::EXPERT_BYTES] = low, high
    return bytes(narrow)
