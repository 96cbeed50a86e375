"""The names of pages of K/V in a pool, without a compiler.

SGLang 0.5.23 names a page by a SHA-256 over its tokens and the name of the page before it. It
builds C++ for that when the first request asks the pool, which takes a compiler, OpenSSL's headers
and up to a minute. If its caches are flushed meanwhile, as with every update of the weights, SGLang
waits 10 s for the thread that builds, and ends the engine. `get_hash` takes the place of the C++.
It gives the same names, so that engines of both kinds find each other's pages. The names of 100,000
tokens in pages of 16 take 10 ms, and 1.5 ms in C++.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence
from types import ModuleType

_TOKEN_BYTES = 4


def get_hash(
    tokens: Sequence[int],
    count: int,
    unit_width: int,
    is_bigram: bool,
    prior_digest: bytes | None,
    page_tokens: int | None = None,
) -> str | list[str]:
    """Names of the pages of the first `count` units, the last page perhaps not full.

    Args:
        tokens: Ids below 2^32.
        count: Units that are named: single tokens, or pairs of a token and the next one.
        unit_width: Tokens of a unit, 1 or 2.
        is_bigram: Units are such pairs, as SGLang files K/V beside a draft head: a head reads the
            next token too, so `count` pairs are of `count` + 1 tokens.
        prior_digest: Name of the page before the first one, 32 bytes; None if it begins a context.
        page_tokens: Units of a page; None: all units are one page.

    Returns:
        64 hexadecimal digits for each page; of one page alone not in a list.

    Raises:
        ValueError: the units are neither tokens nor such pairs, or tokens are missing.
        OverflowError: a token is below 0, or 2^32 or more.
    """
    if unit_width != (2 if is_bigram else 1):
        raise ValueError(
            f"unit_width must be 1 for tokens and 2 for pairs of a token and its next one, got "
            f"{unit_width}"
        )
    words = _pairs(tokens, count) if is_bigram else array("I", tokens[:count])
    if sys.byteorder == "big":
        words.byteswap()
    data, digest, names = words.tobytes(), prior_digest or b"", list[str]()
    size = (page_tokens or max(1, count)) * unit_width * _TOKEN_BYTES
    for start in range(0, max(1, len(data)) if page_tokens is None else len(data), size):
        digest = hashlib.sha256(digest + data[start : start + size]).digest()
        names.append(digest.hex())
    return names[0] if page_tokens is None else names


def _pairs(tokens: Sequence[int], count: int) -> "array[int]":
    """Each of the first tokens and the one behind it, flat."""
    words = array("I", tokens[: count + 1] if count else ())
    if count and len(words) != count + 1:
        raise ValueError(f"{count} pairs are of {count + 1} tokens, got {len(words)}")
    pairs = array("I", bytes(2 * count * _TOKEN_BYTES))
    pairs[0::2], pairs[1::2] = words[:-1], words[1:]
    return pairs


def module_with_get_hash() -> ModuleType:
    """This file, in place of the module that SGLang would build."""
    return sys.modules[__name__]
