"""What `forgemq eval` judges a model on, and what it refuses by name."""

import shutil
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import msgspec
import pytest

from forgemq_contracts.run import LogLayout, RunConfiguration
from forgemq_launcher.arguments import options_of
from forgemq_launcher.asked_run import check_paths, configured
from forgemq_launcher.core.configuration import ConfigurationError, document
from forgemq_launcher.core.judging import judging
from forgemq_launcher.judged_domain import judged_document
from forgemq_launcher.run_folder import RunFolder
from tests.small_run import small_run

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "deploy" / "demo" / "model"
FILE = """
seed = 0
[model]
path = "model"
[[queues]]
domain = "desk"
task_source = "m:task"
agent = "m:play"
[[queues]]
domain = "other"
[evaluation]
tasks = 8
[trainer]
steps = 2
"""
OF_TRAINING = """
[[live]]
name = "app"
[loss]
kind = "mine:loss"
[lora]
rank = 8
[distillation]
url = "http://teacher"
[[stages]]
from_step = 0
domains = [{ domain = "desk", share = 0.5 }, { domain = "other", share = 0.5 }]
"""


@pytest.fixture
def place(tmp_path) -> Iterator[Path]:
    """A model that no file describes, in the folder that it is judged from."""
    (tmp_path / "models").mkdir()
    with chdir(tmp_path):
        yield Path(shutil.copytree(MODEL, tmp_path / "models" / "small"))


def judged(*arguments: str) -> tuple[RunConfiguration, str]:
    values, source = judged_document(options_of(["eval", *arguments, "--samples", "3"]))
    return configured(values, source=source, run="judged-1"), source


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigurationError) as error:
        judged(*arguments)
    return str(error.value)


def test_one_domain_of_a_file_is_judged_without_the_others_and_without_what_trains(place):
    Path("mine.toml").write_text(FILE + OF_TRAINING)
    made, source = judged(str(place), "mine.toml", "seed=3", "--domain", "desk")
    assert source == "mine.toml"
    assert ([queue.domain for queue in made.queues], made.seed) == (["desk"], 3)
    assert (made.model.path, made.evaluation.tasks) == (str(place), 8)
    assert (made.live, made.stages, made.lora, made.distillation) == ((), (), None, None)
    assert made.loss.kind == "cispo"


@pytest.mark.parametrize(
    ("text", "domain", "said"),
    [
        (FILE, "nowhere", "--domain: there is no domain 'nowhere'; there are desk, other"),
        (FILE, "other", "queues.other.agent: none plays its held-out tasks"),
        (
            FILE.replace("tasks = 8", ""),
            "desk",
            "evaluation.tasks: the file has no held-out tasks: set evaluation.tasks=N",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused_by_name(text, domain, said):
    with pytest.raises(ConfigurationError) as error:
        judging(document(text, overrides=[]), model="m", domain=domain)
    assert str(error.value) == said


def test_without_a_file_the_domain_is_that_of_the_run_whose_checkpoint_is_judged(place):
    run = RunFolder(Path("runs") / "desk-7")
    made = small_run(group_partitions=3)
    queue = msgspec.structs.replace(made.queues[0], agent="m:play", task_source="m:task")
    made = msgspec.structs.replace(made, run="desk-7", queues=(queue,))
    run.make(made)
    step = run / "checkpoints" / "step-00000004"
    shutil.copytree(MODEL, step)
    found, source = judged(str(step), "evaluation.tasks=2", "--domain", queue.domain)
    assert source == str(run / "configuration.json")
    assert (found.model.path, found.queues) == (str(step), made.queues)
    assert (found.log, found.evaluation.tasks) == (LogLayout(group_partitions=3), 2)


def test_without_a_run_the_domain_is_that_of_the_file_beside_the_model_then_of_the_one_here(place):
    Path("run.toml").write_text(FILE)
    assert judged(str(place), "--domain", "desk")[1] == str(Path.cwd() / "run.toml")
    (place.parent / "run.toml").write_text(FILE)
    assert judged(str(place), "--domain", "desk")[1] == str(place.parent / "run.toml")
    (place.parent / "run.toml").write_text(FILE.replace("desk", "another"))
    assert judged(str(place), "--domain", "desk")[1] == str(Path.cwd() / "run.toml")
    assert refused(str(place), "--domain", "nowhere") == (
        "--domain: nothing says what domain 'nowhere' is; "
        f"{place.parent / 'run.toml'}, {Path.cwd() / 'run.toml'} has no such domain: name a run's "
        "FILE, or give its agent, tasks and rewards as queues.nowhere.agent=module:function and "
        "so on"
    )


def test_a_domain_of_no_file_is_what_the_arguments_say_and_the_model_is_as_it_describes_itself(
    place,
):
    desk = ("queues.desk.agent=m:play", "queues.desk.task_source=m:task")
    made, source = judged(str(place), *desk, "episodes.sampling.max_tokens=80", "--domain", "desk")
    assert source == "key=value"
    assert (made.queues[0].agent, made.evaluation.tasks) == ("m:play", 64)
    assert (made.model.context_tokens_max, made.model.dtype) == (1024, "float32")
    tokens = "episodes.sampling.max_tokens=80"
    made, _ = judged(str(place), tokens, "--domain", "verifiers:My_env")
    assert (made.queues[0].domain, made.queues[0].agent) == ("my_env", "verifiers:My_env")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("queues.desk.agent=m:play",), "key=value: queues.0.task_source: must be given"),
        (
            ("queues.desk.task_source=m:task",),
            "key=value: queues.desk.agent: none plays its held-out tasks",
        ),
        (("queues.dask.agent=m:play",), "queues.dask: no such element; there are desk"),
    ],
)
def test_half_a_domain_is_refused_by_the_field_that_it_lacks(place, arguments, said):
    assert refused(str(place), *arguments, "--domain", "desk") == said


def test_a_file_may_come_before_or_behind_the_options_and_only_once(capsys):
    behind = options_of(["eval", "m", "--domain", "d", "--samples", "1", "run.toml", "seed=1"])
    assert (behind.file, behind.overrides) == (Path("run.toml"), ["seed=1"])
    with pytest.raises(SystemExit):
        options_of(["eval", "m", "a.toml", "b.toml", "--domain", "d", "--samples", "1"])
    assert "one FILE at most may be given, got a.toml b.toml" in capsys.readouterr().err


def test_a_model_of_any_family_is_judged_and_a_folder_without_one_is_refused_first(place):
    desk = ("queues.desk.agent=m:play", "queues.desk.task_source=m:task", "--domain", "desk")
    tokens = "episodes.sampling.max_tokens=80"
    (place / "config.json").write_text('{"model_type": "gpt2"}')
    made, source = judged(str(place), tokens, *desk)
    with pytest.raises(ConfigurationError, match="no module 'm' in code_paths"):
        check_paths(made, source=source, trains=False)
    with pytest.raises(ConfigurationError, match="has model_type 'gpt2', which is not supported"):
        check_paths(made, source=source)
    assert refused("nowhere", "--domain", "desk") == "model.path: nowhere has no config.json"
    adapter = Path("adapted")
    adapter.mkdir()
    (adapter / "adapter_config.json").touch()
    assert refused("adapted", "--domain", "desk") == (
        "model.path: adapted has an adapter and no model: `forgemq merge` writes one"
    )
