"""One thread for tiny tensors, as more only wait for each other."""

from collections.abc import Iterator

import pytest
import torch

from tests.autojump import pytest_asyncio_loop_factories  # noqa: F401 - a hook
from tests.unit.trainer.rank_scene import RankPair, RankProcesses


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def rank_pair() -> Iterator[RankPair]:
    """Two ranks for the tests of a file.

    Each group of ranks has threads of gloo, which wake 100 times a second until their process ends:
    those of a whole session made 40,000 context switches a second.
    """
    pair = RankPair()
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankProcesses]:
    """Four ranks on the CPU, with gloo; they start with the first test that uses them."""
    ranks = RankProcesses(world=4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module", params=[3, 4])
def ranks_of(request: pytest.FixtureRequest) -> Iterator[tuple[int, RankProcesses]]:
    """Three and four ranks on the CPU, and how many they are."""
    ranks = RankProcesses(world=request.param)
    yield request.param, ranks
    ranks.close()
