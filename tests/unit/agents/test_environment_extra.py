"""An agent that is an environment, where the package verifiers is not installed."""

import subprocess
import sys

from forgemq_contracts.run import Model, Queue, RunConfiguration, Trainer


def environment_run() -> RunConfiguration:
    return RunConfiguration(
        run="r",
        seed=0,
        model=Model(path="m"),
        queues=(Queue(domain="d", task_source="", agent="verifiers:my_env"),),
        trainer=Trainer(steps=1),
    )


def test_an_environment_without_the_package_is_refused_with_the_extra_that_has_it():
    """In a process of its own, to which the package is not there."""
    program = (
        "import sys\n"
        "sys.modules['verifiers'] = None\n"
        "from forgemq_agents.user_code import load_domains\n"
        "from tests.unit.agents.test_environment_extra import environment_run\n"
        "load_domains(environment_run())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1].endswith(
        "queues.d.agent: 'verifiers:my_env' needs the package verifiers: install the extra "
        "'verifiers' (forgemq-agents[verifiers])"
    )
