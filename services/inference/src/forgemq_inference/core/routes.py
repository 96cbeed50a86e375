"""Expert routes of a completion, from the engine's answer to the bytes of its record.

For each token of a request SGLang keeps the experts of its newest pass over that token. It returns
them as int32[tokens, layers, top_k], from a token of our choice to the last but one (no pass reads
the last). Asked from the last token of the context on, it returns one row for each sampled token:
the experts of the pass that sampled it.

If the engine retracted the request (new weights, or out of memory), it recomputed the context and
the output so far. Routes of those tokens are then the recomputation's, not those of the passes that
sampled them; tokens sampled later build on the recomputation.
"""

from msgspec import Struct

from forgemq_contracts.rules import EXPERT_BYTES

_RECORDED_BYTES = 4  # int32, little-endian


class InvalidRoutesError(ValueError):
    """The engine's routes do not fit the model or the output; the text says how."""


class Experts(Struct, frozen=True, kw_only=True):
    """The mixture of experts in a model.

    Attributes:
        layers: All layers of the model; the engine records zeros for one without a router.
        top_k: Experts that run for each token and layer.
    """

    layers: int
    top_k: int


def packed_routes(recorded: bytes, *, tokens_count: int, experts: Experts) -> bytes:
    """Routes of a completion as the record has them: int16[tokens, layers, top_k].

    Args:
        recorded: int32[tokens, layers, top_k], little-endian, as the engine returned it.
        tokens_count: Sampled tokens.
        experts: Of the model.

    Raises:
        InvalidRoutesError: another number of values, or one that cannot be an expert's index.
    """
    expected_bytes = tokens_count * experts.layers * experts.top_k * _RECORDED_BYTES
    if len(recorded) != expected_bytes:
        raise InvalidRoutesError(
            f"routes: {len(recorded)} bytes, but {tokens_count} tokens, {experts.layers} layers "
            f"and {experts.top_k} experts make {expected_bytes}"
        )
    # Slices of bytes, not a loop over numbers: a long completion has millions of them, and the
    # event loop waits meanwhile.
    low, high = recorded[0::_RECORDED_BYTES], recorded[1::_RECORDED_BYTES]
    above = recorded[2::_RECORDED_BYTES] + recorded[3::_RECORDED_BYTES]
    if above.count(0) != len(above) or not high.isascii():
        raise InvalidRoutesError("routes: an expert is no int16 of 0 or more")
    narrow = bytearray(EXPERT_BYTES * len(low))
    narrow[0::EXPERT_BYTES], narrow[1::EXPERT_BYTES] = low, high
    return bytes(narrow)
