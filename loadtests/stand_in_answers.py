"""What a stand-in engine reads of a request, and the tokens that follow from its context."""

import hashlib
import json
import math

import msgspec

SLICE_S_MIN = 0.01
"""A step of decoding takes about as long. More timers would be a load of their own."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """How fast the stand-in answers, and with what.

    Attributes:
        latency_s: From the request to its answer, pauses not counted.
        tokens: Number sampled for each request, if its max_new_tokens is not lower.
        slices: How often in its time a request looks for pauses and new weights, at most; a slice
            takes at least `SLICE_S_MIN`.
        vocabulary_size: Token ids are below it.
        context_tokens_max: Context and output together.
        pretends_groups: Whether it accepts process groups, without receiving anything; else it
            refuses them.
        seed: Other seeds sample other tokens.
    """

    latency_s: float = 0.0
    tokens: int = 32
    slices: int = 8
    vocabulary_size: int = 704
    context_tokens_max: int = 196_608
    pretends_groups: bool = False
    seed: int = 0


class Sampling(msgspec.Struct, frozen=True):
    """The part of a request's sampling parameters that the stand-in uses."""

    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()


class Generation(msgspec.Struct, frozen=True):
    """The fields of a /generate body that the stand-in uses."""

    input_ids: msgspec.Raw
    sampling_params: Sampling = Sampling()
    rid: str | None = None
    stream: bool = False


class Context(msgspec.Struct, frozen=True):
    """Number of tokens of a context, and its last ones."""

    tokens: int
    end: list[int]


# Decoding every id of a long context would cost more time than the answer takes.
_CONTEXT_END_TOKENS = 64


def context_of(input_ids: msgspec.Raw) -> Context:
    """The part of a context that decides the answer; does not decode every id."""
    text = bytes(input_ids).strip(b"[] \n")
    end = text.rsplit(b",", _CONTEXT_END_TOKENS)[-_CONTEXT_END_TOKENS:]
    return Context(tokens=text.count(b",") + bool(text), end=[int(token) for token in end if token])


def sampled(context: list[int], *, count: int, speed: Speed) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities that depend on the context and the seed alone."""
    end = context[-_CONTEXT_END_TOKENS:]
    return sampled_after(Context(tokens=len(context), end=end), count=count, speed=speed)


def sampled_after(context: Context, *, count: int, speed: Speed) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities that depend on this part of a context and the seed alone."""
    key = json.dumps([speed.seed, context.end, context.tokens]).encode()
    noise = hashlib.shake_128(key).digest(4 * count)
    tokens, logprobs = [], []
    for index in range(count):
        left = int.from_bytes(noise[4 * index : 4 * index + 2], "big")
        right = int.from_bytes(noise[4 * index + 2 : 4 * index + 4], "big")
        tokens.append(left % speed.vocabulary_size)
        logprobs.append(math.log((right + 1) / 65_536))
    return tokens, logprobs
