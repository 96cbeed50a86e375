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
    """Names of the pages of the first `count` tokens, the last page perhaps not full.

    Args:
        tokens: Ids below 2^32.
        count: Of the tokens that are named.
        unit_width: 1.
        is_bigram: False; a run with a pool has no draft head.
        prior_digest: Name of the page before the first one, 32 bytes; None if it begins a context.
        page_tokens: Tokens of a page; None: all tokens are one page.

    Returns:
        64 hexadecimal digits for each page; of one page alone not in a list.

    Raises:
        ValueError: the tokens are not single ones.
        OverflowError: a token is below 0, or 2^32 or more.
    """
    if is_bigram or unit_width != 1:
        raise ValueError("pages of single tokens alone have names here, not those of a draft head")
    words = array("I", tokens[:count])
    if sys.byteorder == "big":
        words.byteswap()
    data, digest, names = words.tobytes(), prior_digest or b"", list[str]()
    size = (page_tokens or max(1, count)) * _TOKEN_BYTES
    for start in range(0, max(1, len(data)) if page_tokens is None else len(data), size):
        digest = hashlib.sha256(digest + data[start : start + size]).digest()
        names.append(digest.hex())
    return names[0] if page_tokens is None else names


def module_with_get_hash() -> ModuleType:
    """This file, in place of the module that SGLang would build."""
    return sys.modules[__name__]
