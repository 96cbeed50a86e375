"""What the command line refuses before anything starts."""

import io
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.commands.creation import blobs_address
from forgemq_launcher.dispatch import run_tool
from forgemq_launcher.records.evaluation import DomainEvaluation
from forgemq_launcher.run_folder import RunFolder, RunFolderError
from forgemq_run_view.pass_at_k import PassRate
from tests.small_run import small_run

DEMO = Path(__file__).parents[3] / "deploy" / "demo"


@pytest.fixture
def tool(tmp_path):
    """Runs a command; returns its status and what it printed."""

    def run(*arguments: str, **variables: str) -> tuple[int, str]:
        console = Console(file=io.StringIO(), width=200)
        environ = {"FORGEMQ_LAUNCHER_RUNS": str(tmp_path / "runs"), **variables}
        status = run_tool(arguments, environ=environ, console=console)
        return status, console.file.getvalue()

    return run


@pytest.fixture
def model(tmp_path) -> Path:
    """A copy of the demo's model that a test may damage."""
    return Path(shutil.copytree(DEMO / "model", tmp_path / "model"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("episodes.sampling.top_p=0.9", "episodes.sampling.top_p is 0.9"),
        ("episodes.sampling.temperature=0", "episodes.sampling.temperature is 0"),
        ("loss.kind=ppo", "loss.kind must be one of cispo, truncated_is, ppo_clip, gspo, icepop"),
        ("queues.0.group_size=1", "group_size (G) must be at least 2"),
        ('code_paths=["nowhere"]', "nowhere is no folder"),
        ("model.path=nowhere", "nowhere has no config.json"),
        ("speculation.head=nowhere", "nowhere has no config.json; `forgemq new-head` writes"),
        (f"speculation.head={DEMO / 'model'}", "model has no LlamaForCausalLMEagle"),
        ("model.renderer=qwen99", "model.renderer: No renderer config registered for name='qwen"),
    ],
)
def test_a_run_that_cannot_work_is_refused_by_name_and_leaves_nothing(
    tool, tmp_path, override, expected
):
    status, printed = tool("run", str(DEMO / "run.toml"), override)
    assert status == 2
    assert expected in printed
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (
            lambda m: (m / "config.json").write_text("{}"),
            "has model_type '', which is not supported for tree training",
        ),
        (
            lambda m: (m / "config.json").write_text('{"model_type": "gpt2"}'),
            "has model_type 'gpt2', which is not supported for tree training: it has dropout",
        ),
        (lambda m: (m / "config.json").write_text("{"), "config.json: Input data was truncated"),
        (lambda m: (m / "tokenizer.json").unlink(), "has no tokenizer (tokenizer.json)"),
        (lambda m: (m / "model.safetensors").unlink(), "has no weights (*.safetensors)"),
        (lambda m: (m / "tokenizer.json").rename(m / "tokenizer.model"), "json is missing: the"),
        (lambda m: (m / "tokenizer.json").write_text("{"), "tokenizer.json: EOF while parsing"),
        (lambda m: (m / "chat_template.jinja").write_text("{% for %}"), "chat template: Expected"),
        (lambda m: (m / "tokenizer_config.json").write_text("[]"), "must hold a JSON object"),
    ],
)
def test_a_folder_without_a_model_that_trains_is_refused(tool, model, spoil, expected):
    spoil(model)
    status, printed = tool("run", str(DEMO / "run.toml"), f"model.path={model}")
    assert status == 2
    assert expected in printed


def test_an_unknown_run_or_setting_is_refused(tool, tmp_path):
    for command in ("audit", "inspect", "dlq"):
        status, printed = tool(command, "nobody")
        assert (status, printed.startswith("forgemq: there is no run 'nobody'")) == (2, True)
    console = Console(file=io.StringIO(), width=200)
    assert run_tool(["runs"], environ={"FORGEMQ_LAUNCHER_RUN": "x"}, console=console) == 2
    assert "FORGEMQ_LAUNCHER_RUN: no such setting" in console.file.getvalue()


def test_the_folder_of_an_evaluation_is_not_continued_as_a_run(tool, tmp_path):
    made = small_run(group_partitions=1)
    RunFolder(tmp_path / "runs" / "judged-1").make(made, is_evaluation=True)
    assert tool("run", str(DEMO / "run.toml"), "--resume", "judged-1") == (
        2,
        "forgemq: judged-1 is an evaluation, which trains nothing: it cannot be continued as a "
        "run; judge the model again with forgemq eval\n",
    )
    with pytest.raises(RunFolderError, match=r"exists: choose another run id$"):
        RunFolder(tmp_path / "runs" / "judged-1").make(made)


def test_an_import_into_a_run_that_is_unknown_or_down_is_refused(tool, run_folder, tmp_path):
    file = str(tmp_path / "talks.jsonl")
    assert tool("import", "nobody", file, "--domain", "d") == (
        2,
        f"forgemq: there is no run 'nobody' in {tmp_path / 'runs'}: for one that is up elsewhere "
        "set FORGEMQ_AGENTS_GATEWAY_URL and FORGEMQ_AGENTS_ADMIN_KEY\n",
    )
    assert tool("import", "desk-1", file, "--domain", "d") == (
        2,
        "forgemq: run desk-1 is not up: start it with --resume, or set "
        "FORGEMQ_AGENTS_GATEWAY_URL\n",
    )


@pytest.mark.parametrize(
    "command", [("import", "desk-1", "talks.jsonl", "--domain", "d"), ("lanes", "desk-1")]
)
def test_of_a_completed_run_no_command_that_needs_it_up_advises_a_resume(tool, run_folder, command):
    (run_folder / "report.json").write_text('{"reason": "completed"}')
    assert tool(*command) == (
        2,
        "forgemq: run desk-1 is completed, and nothing is left to play; start a new run from its "
        "newest checkpoint, with model.path=<runs>/desk-1/checkpoints/checkpoints/step-...\n",
    )
    (run_folder / "report.json").write_text('{"reason": "interrupted"}')
    status, printed = tool(*command)
    assert (status, "run desk-1 is not up: start it with --resume" in printed) == (2, True)


def test_an_import_from_elsewhere_asks_the_gateway_that_is_named(tool, tmp_path):
    file = tmp_path / "talks.jsonl"
    file.write_text("nope\n")
    named = {"FORGEMQ_AGENTS_GATEWAY_URL": "http://127.0.0.1:9", "FORGEMQ_AGENTS_ADMIN_KEY": "k"}
    status, printed = tool("import", "elsewhere", str(file), "--domain", "d", **named)
    assert status == 2
    assert printed.startswith(f"import: {file}:1: not one JSON object")
    assert printed.endswith("nothing is imported\n")


def test_a_folder_of_blobs_is_announced_by_its_absolute_path():
    assert blobs_address({"FORGEMQ_BLOBS": "my/blobs"}) == f"{Path.cwd()}/my/blobs"
    assert blobs_address({"FORGEMQ_BLOBS": "s3://bucket/run"}) == "s3://bucket/run"


def test_a_run_without_a_broker_or_a_blob_store_is_not_created(tool):
    status, printed = tool("create", str(DEMO / "run.toml"))
    assert (status, printed) == (
        2,
        "forgemq: FORGEMQ_BLOBS: must be set: where all services reach the blob store\n",
    )
    status, printed = tool("create", str(DEMO / "run.toml"), FORGEMQ_BLOBS="my/blobs")
    assert (status, printed) == (
        2,
        "forgemq: FORGEMQ_KAFKA: must be set: host:port[,host:port] of the broker\n",
    )


def test_without_runs_the_list_says_how_to_make_one(tool):
    assert tool("runs") == (0, "no runs yet: `make demo` makes the first\n")


def test_a_run_without_a_report_is_listed_with_the_steps_of_its_curves(tool, run_folder):
    def steps() -> str:
        status, printed = tool("runs")
        (row,) = [line for line in printed.splitlines() if "desk-1" in line]
        assert status == 0
        return row.split("\u2502")[3].strip()

    total = run_folder.configuration().trainer.steps
    assert steps() == f"?/{total}"
    lines = [b'{"step":0,"loss":1.0}', b'{"step":1,"loss":1.0}', b'{"step":1,"loss":0.5}', b'{"st']
    (run_folder / "curves.jsonl").write_bytes(b"\n".join(lines))
    assert steps() == f"2/{total}"


def test_an_evaluation_is_listed_as_judged_with_its_success_and_its_whole_id(tool, tmp_path):
    folder = RunFolder(tmp_path / "runs" / "command-line-eval-1")
    folder.make(small_run(group_partitions=1), is_evaluation=True)

    def cells() -> list[str]:
        console = Console(file=io.StringIO(), width=80)
        environ = {"FORGEMQ_LAUNCHER_RUNS": str(tmp_path / "runs")}
        assert run_tool(["runs"], environ=environ, console=console) == 0
        (row,) = [line for line in console.file.getvalue().splitlines() if "eval-1" in line]
        return [cell.strip() for cell in row.split("\u2502")[1:5]]

    assert cells() == ["command-line-eval-1", "stopped", "-", "-"]
    rates = tuple(
        PassRate(k=k, rate=r, low=0.1, high=0.9, tasks=64) for k, r in ((1, 0.283), (2, 0.469))
    )
    judged = DomainEvaluation(
        run="command-line-eval-1",
        model="model",
        domain="command_line",
        samples=2,
        temperature=1.0,
        episodes=128,
        episodes_masked=0,
        confidence=0.95,
        pass_at_k=rates,
        tasks=(),
    )
    (folder / "pass_at_k.json").write_bytes(msgspec.json.encode((judged,)))
    assert cells() == ["command-line-eval-1", "judged", "-", "0.28"]


def test_a_run_with_its_own_broker_is_deleted_with_its_folder(tool, run_folder):
    status, printed = tool("delete", "desk-1")
    assert (status, run_folder.path.is_dir()) == (2, True)
    assert f"delete run desk-1: {run_folder.path}?" in printed
    status, printed = tool("delete", "desk-1", "--yes")
    assert (status, run_folder.path.exists()) == (0, False)
    assert printed.endswith(f"removed {run_folder.path}\n")


def test_a_run_that_is_up_is_not_deleted(tool, run_folder):
    with run_folder.locked():
        status, printed = tool("delete", "desk-1", "--yes")
    assert (status, run_folder.path.is_dir()) == (2, True)
    assert "run desk-1 is already up (process" in printed
    assert printed.endswith("forgemq stop desk-1 ends it\n")


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "a/b", "Desk", "no-such-run"])
def test_nothing_but_a_run_is_deleted(tool, tmp_path, name):
    (tmp_path / "runs").mkdir()
    (tmp_path / "other").mkdir()
    assert tool("delete", name, "--yes")[0] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "runs"]


def test_a_folder_without_a_configuration_is_no_run_and_is_not_deleted(tool, tmp_path):
    (tmp_path / "runs" / "photos").mkdir(parents=True)
    status, printed = tool("delete", "photos", "--yes")
    assert (status, (tmp_path / "runs" / "photos").is_dir()) == (2, True)
    assert "there is no run 'photos'" in printed


DIES_AT_EVENT = """
import os, sys
from forgemq_launcher.run_folder import RunFolder
left = int(sys.argv[2])
def hook(event, arguments):
    global left
    left -= event in ("os.remove", "os.rmdir", "shutil.rmtree")
    if left < 0:
        os._exit(9)
sys.addaudithook(hook)
RunFolder(__import__("pathlib").Path(sys.argv[1])).remove()
"""


@pytest.mark.parametrize("events", [0, 1, 6])
def test_a_run_whose_deletion_was_killed_is_still_a_run_and_is_deleted_by_the_next(
    tool, run_folder, events
):
    run_folder.key_path.write_text("key")
    command = (sys.executable, "-c", DIES_AT_EVENT, str(run_folder.path), str(events))
    assert subprocess.run(command, check=False).returncode == 9
    assert tool("delete", "desk-1", "--yes")[0] == 0
    assert not run_folder.path.exists()


@pytest.mark.parametrize("to", ["absent/run.json", "."])
def test_a_path_that_cannot_be_written_is_left_to_the_program_which_names_it(tool, tmp_path, to):
    with pytest.raises(OSError, match=rf"^\[Errno \d+\] .*: '{tmp_path}"):
        tool("resolve", str(DEMO / "run.toml"), "--to", str(tmp_path / to))


def test_a_file_that_is_no_text_is_refused_by_name(tool, tmp_path):
    (tmp_path / "run.toml").write_bytes(bytes(range(256)))
    status, printed = tool("run", str(tmp_path / "run.toml"))
    assert (status, f"{tmp_path / 'run.toml'}: not a TOML file: " in printed) == (2, True)
    (tmp_path / "run.toml").write_text("# My run\nsteps 8\n")
    status, printed = tool("run", str(tmp_path / "run.toml"))
    assert (status, f"{tmp_path / 'run.toml'}: not a TOML file: " in printed) == (2, True)


@pytest.mark.parametrize(
    "arguments",
    [("--resume", "desk-1", "trainer.steps=2", "seed=9"), ("seed=9", "--resume", "desk-1")],
)
def test_changes_of_a_resume_may_stand_before_or_after_the_run(tool, run_folder, arguments):
    status, printed = tool("run", str(DEMO / "run.toml"), *arguments)
    assert status == 2
    assert "seed was 0 when this run was trained, and is 9 now" in printed


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ('code_paths=["nowhere"]', "nowhere is no folder"),
        ("queues.shop_desk.agent=shop_dsk.agent:play", "no module 'shop_dsk' in code_paths"),
        ("queues.shop_desk.agent=shop_desk.agent:plya", "agent.py; did you mean 'play'?"),
        ("loss.kind=losses_of_mine:loss", "no module 'losses_of_mine' in code_paths"),
    ],
)
def test_a_resume_with_code_that_is_not_there_is_refused_and_changes_no_file(
    tool, tmp_path, override, expected
):
    tool("resolve", str(DEMO / "run.toml"), "--to", str(tmp_path / "run.json"))
    configuration = msgspec.json.decode((tmp_path / "run.json").read_bytes(), type=RunConfiguration)
    folder = RunFolder(tmp_path / "runs" / configuration.run)
    folder.make(configuration)
    before = (folder / "configuration.json").read_bytes()
    arguments = ("--resume", configuration.run, override)
    status, printed = tool(
        "run", str(DEMO / "run.toml"), *arguments, FORGEMQ_LAUNCHER_MEMORY_MIN_BYTES=str(10**18)
    )
    assert (status, expected in printed) == (2, True)
    assert (folder / "configuration.json").read_bytes() == before


@pytest.mark.parametrize("name", ["configuration.json", "report.json"])
@pytest.mark.parametrize("content", [b"{", b"\xff", b"{}"])
def test_a_run_that_cannot_be_read_is_listed_as_such_beside_the_others(
    tool, tmp_path, run_folder, name, content
):
    (run_folder / name).write_bytes(content)
    RunFolder(tmp_path / "runs" / "desk-2").make(small_run(group_partitions=1))
    status, printed = tool("runs")
    assert status == 1
    assert str(run_folder / name) in printed
    rows = [[cell.strip() for cell in line.split("\u2502")[1:3]] for line in printed.splitlines()]
    assert ["desk-1", "unreadable"] in rows
    assert ["desk-2", "stopped"] in rows


@pytest.mark.parametrize(
    "arguments", [("run", "FILE", "--resum", "RUN", "--quick"), ("audit", "RUN", "seed=9")]
)
def test_what_no_command_takes_is_refused_by_name(tool, capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        tool(*arguments)
    printed = capsys.readouterr().err
    assert f"usage: forgemq {arguments[0]} " in printed
    assert f"unrecognized arguments: {arguments[-1]}" in printed


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (("run",), "file"),
        (("run", "--resume", "desk-1"), "file"),
        (("create",), "file"),
        (("resolve", "run.toml"), "--to"),
        (("plan", "run.toml"), "--gpu"),
        (("eval", "model", "--domain", "desk"), "--samples"),
    ],
)
def test_an_argument_that_is_missing_is_named_and_none_that_may_be_left_out(
    tool, capsys, command, missing
):
    with pytest.raises(SystemExit, match="2"):
        tool(*command)
    required = "the following arguments are required: "
    assert capsys.readouterr().err.endswith(f"{required}{missing}\n")


def test_the_version_is_that_of_the_distribution(tool, capsys):
    with pytest.raises(SystemExit, match="0"):
        tool("--version")
    assert capsys.readouterr().out == f"forgemq {version('forgemq-launcher')}\n"
