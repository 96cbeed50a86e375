"""Names of pages in a pool are those that SGLang's own C++ gives."""

from array import array

import pytest

from forgemq_sglang_cpu.page_hashes import get_hash

TOKENS = list(range(5, 45))
PRIOR = bytes(range(32))
PAGES = [
    "5c61d0ee38563babc17f5d12d8a3e6c1441ab7e802288ef2eedb412816c3b7ab",
    "7b9dbe93ecaa02f85b5a52318f9cf1e503eea319632736ea06c7f2f857ed940f",
    "16ea8e9d249cfe0046634cde2b4a9b12cb19a89119f71e577b4cb89d500d95a0",
]
WHOLE_AFTER_PRIOR = "19dd2891cf960e51c571184f31d61f2ab934cec0453ec8ff80f78552e43b3a6b"
PAGES_OF_PAIRS = [
    "252ee0ce55a7cacf6cd23541620af40b12e790703ebab5c6d37c0f70ca2789c0",
    "a7365ae9d268e7f89799e32914d1bb431bc0f8dc67cb66b48fe4e73bcc0c7c3f",
    "f79f0e42313bc0f0b0e70f57e8d71ce9009588b4beef2220762abc2769bc9756",
]
PAIRS_AFTER_PRIOR = "3d4d251d8d031b993aeadc31cfc5fcf70a7f2e77f5ae09eae28c5033812d7116"
NOTHING_AFTER_PRIOR = "630dcd2966c4336691125448bbb25b4ff412a49c732db2c8abc1b8581bd710dd"


@pytest.mark.parametrize("kind", ["I", "q"])
def test_pages_are_named_as_sglang_names_them(kind):
    tokens = array(kind, TOKENS)
    assert get_hash(tokens, 40, 1, False, None, 16) == PAGES
    assert get_hash(tokens, 40, 1, False, PRIOR) == WHOLE_AFTER_PRIOR


@pytest.mark.parametrize("kind", ["I", "q"])
def test_pages_beside_a_draft_head_are_named_as_sglang_names_them(kind):
    tokens = array(kind, TOKENS)
    assert get_hash(tokens, 39, 2, True, None, 16) == PAGES_OF_PAIRS
    assert get_hash(tokens, 39, 2, True, PRIOR) == PAIRS_AFTER_PRIOR
    assert get_hash(tokens, 0, 2, True, PRIOR) == NOTHING_AFTER_PRIOR
    assert get_hash(tokens, 0, 2, True, PRIOR, 16) == []


def test_a_page_is_named_by_all_that_comes_before_it():
    first = bytes.fromhex(PAGES[0])
    assert get_hash(array("q", TOKENS[16:]), 24, 1, False, first, 16) == PAGES[1:]
    assert get_hash(array("q", TOKENS), 20, 1, False, None, 16)[0] == PAGES[0]
    assert get_hash(array("q"), 0, 1, False, PRIOR, 16) == []


@pytest.mark.parametrize(
    ("tokens", "arguments", "error"),
    [
        ([2**32], (1, 1, False, None, 16), OverflowError),
        ([-1], (1, 1, False, None, 16), OverflowError),
        ([1, 2], (1, 2, False, None, 16), ValueError),
        ([1, 2], (1, 1, True, None, 16), ValueError),
        ([1, 2], (2, 2, True, None, 16), ValueError),
    ],
)
def test_what_has_no_name_here_is_refused(tokens, arguments, error):
    with pytest.raises(error):
        get_hash(array("q", tokens), *arguments)
