"""A real engine accepts what a head guesses that the trainer has trained: both read it alike."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from forgemq_sglang_cpu.options import EngineOptions
from tests.engine_fixture import started_engine
from tests.integration.trained_head import (
    generated,
    held_out_starts,
    tokens_a_pass,
    trained_on_demonstrations,
)

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def trained_head(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """The folder of a head after its steps, and its overlap before each of them."""
    return trained_on_demonstrations(tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def guessing_engine(
    trained_head: tuple[Path, list[float]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """An engine that drafts three tokens with the trained head."""
    options = EngineOptions(head=str(trained_head[0]), context_tokens_max=372)
    with started_engine(tmp_path_factory.mktemp("engine"), options) as url:
        yield url


def test_a_pass_of_the_policy_yields_over_two_and_a_half_tokens_with_a_trained_head(
    trained_head: tuple[Path, list[float]], guessing_engine: str
) -> None:
    """A random head yields 1.03: at 4 a pass every guess is accepted."""
    _, overlaps = trained_head
    assert overlaps[0] < 0.2
    assert np.mean(overlaps[-5:]) > 0.6
    answers = generated(guessing_engine, held_out_starts(), temperature=1.0, max_new_tokens=60)
    assert sum(answer["meta_info"]["completion_tokens"] for answer in answers) > 100
    assert 2.5 < tokens_a_pass(answers) <= 4
