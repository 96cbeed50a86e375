"""Which code plays an environment is a matter of the installed version of verifiers."""

from importlib.metadata import version

import pytest

from forgemq_agents import environment_agent, taskset_agent
from forgemq_agents.environment_errors import UnplayableError
from forgemq_agents.environments import Load, loader_of


@pytest.mark.parametrize(
    ("installed", "load"),
    [
        ("0.1.10", environment_agent.load),
        ("0.1.9.post3", environment_agent.load),
        ("0.4.0", taskset_agent.load),
        ("0.12.1", taskset_agent.load),
        ("1.0", taskset_agent.load),
        ("0.5rc1", taskset_agent.load),
        (version("verifiers"), environment_agent.load),
    ],
)
def test_an_environment_is_loaded_as_its_version_asks_for(installed: str, load: Load) -> None:
    assert loader_of(installed) is load


@pytest.mark.parametrize("installed", ["0.2.1", "0.3.1"])
def test_a_version_between_the_two_kinds_is_refused_with_both(installed: str) -> None:
    with pytest.raises(UnplayableError) as refused:
        loader_of(installed)
    assert str(refused.value) == (
        f"verifiers {installed} is installed; environments are played with 0.1.10, and with 0.4 "
        "and later versions"
    )
