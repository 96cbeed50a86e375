"""The one table of families in the documents is that of the code."""

import re
from pathlib import Path

from forgemq_contracts.model_families import (
    ENGINE_EXTRAS_MODEL_TYPES,
    MODEL_TYPES,
    REFUSED_MODEL_TYPES,
    refusal,
)

PAGE = Path(__file__).parents[3] / "docs" / "your_model.md"


def _families(heading: str) -> list[str]:
    """Names in the first column of the table that begins with this heading."""
    table = PAGE.read_text().split(f"| {heading} |")[1].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    return [name for row in rows for name in re.findall("`(.+?)`", row)]


def test_the_page_names_each_supported_and_each_refused_family_once() -> None:
    assert sorted(_families("family")) == sorted(MODEL_TYPES)
    assert sorted(_families("refused")) == sorted(REFUSED_MODEL_TYPES)
    assert not set(MODEL_TYPES) & set(REFUSED_MODEL_TYPES)
    assert set(ENGINE_EXTRAS_MODEL_TYPES) <= set(MODEL_TYPES)


def test_a_refusal_says_the_reason_and_what_is_supported() -> None:
    for model_type, reason in REFUSED_MODEL_TYPES.items():
        assert reason in refusal(model_type)
    assert refusal("unheard_of").endswith("; supported: " + ", ".join(MODEL_TYPES))
