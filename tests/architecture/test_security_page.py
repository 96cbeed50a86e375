"""The page about security says of each claim what holds it."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "security.md"


def claims() -> list[str]:
    """Rows of the tables whose last column is "held by"."""
    found: list[str] = []
    is_claim = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            is_claim = False
        elif line.endswith("| held by |"):
            is_claim = True
        elif is_claim and not line.startswith("|--"):
            found.append(line)
    return found


def test_the_page_makes_claims() -> None:
    assert len(claims()) >= 25


@pytest.mark.parametrize("claim", claims(), ids=lambda row: row.split("|")[1].strip()[:60])
def test_a_claim_names_its_tests_or_says_that_it_has_none(claim: str) -> None:
    held_by = claim.strip("|").rpartition("|")[2].strip()
    tests = re.fullmatch(
        r"`tests/[\w/]+\.py(:test_\w+)?`(, `tests/[\w/]+\.py(:test_\w+)?`)*", held_by
    )
    assert tests or held_by.startswith("none")
