"""Files and functions that a run's queues name are looked for before anything starts."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

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


GRADERS = """
from os import path as paths
def grade(episode): ...
def grade_speed(episode): ...
LIMIT = 3
if LIMIT:
    late = grade
def bind():
    global shared
    shared = 1
"""


def reward_run(function: str, *code_paths: str, field: str = "outcome") -> RunConfiguration:
    functions = {"task_source": "", "agent": "", field: function}
    queue = Queue(domain="d", **functions)
    return RunConfiguration(
        run="r",
        seed=0,
        model=Model(path="m"),
        queues=(queue,),
        trainer=Trainer(steps=1),
        code_paths=code_paths,
    )


def refusal(run: RunConfiguration) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check_user_code(run)
    return str(caught.value)


@pytest.mark.parametrize("field", ["outcome", "process", "speed", "agent", "task_source"])
def test_a_function_that_its_module_lacks_is_refused_with_the_field_and_near_names(
    tmp_path: Path, field: str
) -> None:
    (tmp_path / "my_graders.py").write_text(GRADERS)
    run = reward_run("my_graders:graed", str(tmp_path), field=field)
    assert refusal(run) == (
        f"queues.d.{field}: 'my_graders:graed': there is no 'graed' in "
        f"{tmp_path}/my_graders.py; did you mean 'grade' or 'grade_speed'?"
    )


@pytest.mark.parametrize("name", ["grade", "paths", "late", "LIMIT", "shared", "bind"])
def test_a_name_that_the_text_of_a_module_may_bind_is_taken(tmp_path: Path, name: str) -> None:
    (tmp_path / "my_graders.py").write_text(GRADERS)
    check_user_code(reward_run(f"my_graders:{name}", str(tmp_path)))


@pytest.mark.parametrize(
    "line",
    [
        "from os.path import *",
        "def __getattr__(name): ...",
        "globals().update(x=1)",
        "import sys; setattr(sys.modules[__name__], 'x', 1)",
        "for (a, *x), b in (): pass",
        "with open('f') as x: pass",
        "try: pass\nexcept OSError as x: pass",
        "(x := 1)",
        "match 1:\n    case {'a': [*x]}: pass",
        "match 1:\n    case {'a': 1, **x}: pass",
        "class x: ...",
        "import x.y",
        "x: int = 3",
        "async def x(episode): ...",
    ],
)
def test_a_module_whose_text_may_bind_the_name_is_left_to_its_service(
    tmp_path: Path, line: str
) -> None:
    (tmp_path / "my_graders.py").write_text(f"{line}\n")
    check_user_code(reward_run("my_graders:x", str(tmp_path)))


def test_names_within_functions_and_classes_are_not_those_of_the_module(tmp_path: Path) -> None:
    (tmp_path / "my_graders.py").write_text(
        "def outer():\n    def grade(e): ...\n    x = lambda: (y := 1)\n"
        "class Graders:\n    def grade(self): ...\n"
    )
    for name in ("grade", "x", "y"):
        assert f"there is no '{name}' in" in refusal(
            reward_run(f"my_graders:{name}", str(tmp_path))
        )


def test_a_module_that_python_does_not_take_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "my_graders.py").write_text("def grade(e):\n    return (\n")
    assert refusal(reward_run("my_graders:grade", str(tmp_path))) == (
        f"queues.d.outcome: 'my_graders:grade': {tmp_path}/my_graders.py, line 2: '(' was never "
        "closed"
    )


def test_modules_within_packages_are_read_and_those_that_are_not_there_refused(
    tmp_path: Path,
) -> None:
    for folder, init in (("plain", None), ("usual", ""), ("growing", "__path__.append('/x')")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "graders.py").write_text(GRADERS)
        if init is not None:
            (tmp_path / folder / "__init__.py").write_text(init)
        check_user_code(reward_run(f"{folder}.graders:grade", str(tmp_path)))
        assert "did you mean 'grade'" in refusal(
            reward_run(f"{folder}.graders:graed", str(tmp_path))
        )
    for folder in ("plain", "usual"):
        assert refusal(reward_run(f"{folder}.gradres:grade", str(tmp_path))) == (
            f"queues.d.outcome: '{folder}.gradres:grade': no module '{folder}.gradres' in "
            "code_paths or installed"
        )
    check_user_code(reward_run("growing.gradres:grade", str(tmp_path)))


@pytest.mark.parametrize(
    "name", ["json:loads", "math:sqrt", "os.path:join", "forgemq_graders:math_answer"]
)
def test_installed_functions_are_found_in_any_kind_of_module(name: str) -> None:
    check_user_code(reward_run(name))


@pytest.mark.parametrize("module", ["__main__", "json.", "json..decoder"])
def test_what_is_the_name_of_no_module_is_refused(module: str) -> None:
    assert "no module" in refusal(reward_run(f"{module}:loads"))


def test_a_function_of_another_module_with_the_name_of_the_users_is_taken(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("def grade(episode): ...\n")
    check_user_code(reward_run("json:loads", str(tmp_path)))
    said = refusal(reward_run("json:laods", str(tmp_path)))
    files = f"{tmp_path}/json.py or {json.__file__}"
    assert said.endswith(f"no 'laods' in {files}; did you mean 'loads' or 'load'?")


@pytest.mark.parametrize("name", ["json", "time", "hidden", "forgemq_graders.turns"])
def test_the_users_module_that_python_does_not_come_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Code paths come behind what is installed, and behind all of PYTHONPATH."""
    installed, own = tmp_path / "installed", tmp_path / "own"
    package, _, part = name.partition(".")
    for folder in (installed, own):
        file = folder / package / f"{part}.py" if part else folder / f"{package}.py"
        file.parent.mkdir(parents=True)
        file.write_text("def grade(episode): ...\n")
        if part:
            (folder / package / "__init__.py").touch()
    if name == "hidden":
        monkeypatch.syspath_prepend(installed)
    place = installed / "hidden.py" if name == "hidden" else find_spec(package).origin
    assert refusal(reward_run(f"{name}:grade", str(own))) == (
        f"queues.d.outcome: the module {package!r} in code_paths is hidden by {place}, which "
        "Python finds first: give it another name"
    )
    monkeypatch.syspath_prepend(own)
    if name == "hidden":
        check_user_code(reward_run(f"{name}:grade", str(own)))


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
