"""Files that a run's queues name are looked for before anything starts."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from forgemq_contracts.run import Model, Queue, RunConfiguration, Trainer
from forgemq_launcher.core.configuration import ConfigurationError
from forgemq_launcher.user_code import check_user_code


@pytest.mark.parametrize("field", ["task_file", "held_out_file"])
def test_a_file_of_tasks_that_is_not_there_is_refused_with_its_field(tmp_path, field):
    there = tmp_path / "there.jsonl"
    there.write_text("1\n")
    files = {"task_file": str(there), "held_out_file": str(there)}
    missing = str(tmp_path / "missing.jsonl")
    runs = [
        RunConfiguration(
            run="r",
            seed=0,
            model=Model(path="m"),
            queues=(Queue(domain="d", task_source="", agent="json:loads", **named),),
            trainer=Trainer(steps=1),
        )
        for named in (files, {**files, field: missing})
    ]
    check_user_code(runs[0])
    with pytest.raises(ConfigurationError, match=rf"^queues\.d\.{field}: there is no {missing}$"):
        check_user_code(runs[1])


def environment_run(*code_paths: str) -> RunConfiguration:
    return RunConfiguration(
        run="r",
        seed=0,
        model=Model(path="m"),
        queues=(Queue(domain="d", task_source="", agent="verifiers:my_env"),),
        trainer=Trainer(steps=1),
        code_paths=code_paths,
    )


@pytest.mark.skipif(find_spec("verifiers") is None, reason="needs the extra verifiers")
def test_the_module_of_an_environment_is_looked_for(tmp_path):
    run = environment_run(str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"^queues\.d\.agent: .*no module 'my_env'"):
        check_user_code(run)
    (tmp_path / "my_env.py").touch()
    check_user_code(run)


def test_an_environment_without_the_package_is_refused_with_the_extra_that_has_it():
    """In a process of its own, to which the package is not there."""
    program = (
        "import sys\n"
        "sys.modules['verifiers'] = None\n"
        "from forgemq_launcher.user_code import check_user_code\n"
        "from tests.unit.launcher.test_user_code import environment_run\n"
        "check_user_code(environment_run())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1].endswith(
        "queues.d.agent: 'verifiers:my_env' needs the package verifiers: install the extra "
        "'verifiers' (forgemq-agents[verifiers])"
    )
