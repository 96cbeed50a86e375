"""What commands print of what they were asked for: all of it, or why there is nothing."""

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from forgemq_launcher.arguments import options_of
from forgemq_launcher.commands.inspection import absence
from forgemq_launcher.commands.service_process import print_service
from forgemq_launcher.commands.starting import resume_command
from forgemq_launcher.dispatch import run_tool
from forgemq_launcher.records.follower import Follower
from forgemq_launcher.run_folder import RunFolder
from forgemq_run_view.report import TrainedTrees, report
from tests.unit.launcher.test_follower import log_of
from tests.unit.run_view.synthetic import SyntheticRun, configuration, started


@pytest.mark.slow
async def test_a_line_of_a_service_is_printed_whole_however_long_it_is():
    console = Console(file=io.StringIO(), width=80)
    unknown = "x" * 100_000
    arguments = ["import", "talks.jsonl", "--domain", "d", unknown]
    status = await print_service("agents", arguments, environ=dict(os.environ), console=console)
    assert status == 2
    assert console.file.getvalue().replace("\n", "").endswith(f"arguments: {unknown}")


def test_requests_of_no_group_are_refused(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    environ = {"FORGEMQ_LAUNCHER_RUNS": str(tmp_path)}
    assert run_tool(("inspect", "desk-1", "--requests"), environ=environ, console=console) == 2
    said = "forgemq: --requests: name a GROUP or an EPISODE behind RUN\n"
    assert console.file.getvalue() == said


@pytest.mark.parametrize(
    ("is_known", "kept", "said"),
    [
        (
            True,
            ["g.0.0", "g.1.0"],
            "there is no turn of 'g.9'; its group has turns of g.0.0, g.1.0",
        ),
        (True, [], "no turn of 'g.9' is on the log: none was played, or they were deleted "),
        (False, [], "nothing is known of 'g.9' in this run"),
    ],
)
def test_why_there_is_no_turn_to_show(is_known, kept, said):
    assert absence("g.9", is_known=is_known, kept=kept).startswith(said)


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_cannot_be_written_is_one_line_and_no_traceback(tmp_path, unbuffered):
    environ = {"FORGEMQ_LAUNCHER_RUNS": str(tmp_path), "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "forgemq_launcher", "runs"],
            env={**os.environ, **environ},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (
        1,
        "forgemq: [Errno 28] No space left on device\n",
    )


def test_a_run_that_goes_on_after_a_stop_is_listed_as_up(tmp_path):
    folder = RunFolder(tmp_path / "r")
    folder.make(configuration())
    log = asyncio.run(log_of(SyntheticRun().play(steps=2)))
    state = Follower(log, started()).state()
    stopped = report(state, trees=TrainedTrees(), verdicts=(), duration_s=1.0, reason="interrupted")
    (folder / "report.json").write_bytes(msgspec.json.encode(stopped))
    (folder / "curves.jsonl").write_text('{"step":2,"loss":1.0}\n')

    def cells() -> list[str]:
        console = Console(file=io.StringIO(), width=200)
        assert (
            run_tool(["runs"], environ={"FORGEMQ_LAUNCHER_RUNS": str(tmp_path)}, console=console)
            == 0
        )
        (row,) = [line for line in console.file.getvalue().splitlines() if " r " in line]
        return [cell.strip() for cell in row.split("\u2502")[1:4]]

    assert cells() == ["r", "interrupted", f"{state.steps_trained}/3"]
    with folder.locked():
        assert cells() == ["r", "up", "3/3"]


@pytest.mark.parametrize("seconds", ["nan", "-1", "0", "inf", "soon"])
def test_a_wait_of_no_length_is_refused(seconds, capsys):
    with pytest.raises(SystemExit, match="2"):
        options_of(["stop", "desk-1", f"--timeout={seconds}"])
    said = f"--timeout: must be above 0 and at most 1e+09, got {seconds!r}\n"
    assert capsys.readouterr().err.endswith(said)


@pytest.mark.slow
def test_why_a_command_is_refused_is_not_in_its_output(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "forgemq_launcher", "inspect", "desk-1", "g", "--requests"],
        env={**os.environ, "FORGEMQ_LAUNCHER_RUNS": str(tmp_path), "FORGEMQ_KAFKA": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    said = f"forgemq: there is no run 'desk-1' in {tmp_path}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


TOLD_OF_CTRL_C = """
import signal
from forgemq_launcher.command_line import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background ignores it.
main()
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_command_that_waits_for_its_broker_without_a_traceback(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent_broker:
        broker = f"127.0.0.1:{silent_broker.getsockname()[1]}"
        environ = {"FORGEMQ_LAUNCHER_RUNS": str(tmp_path), "FORGEMQ_KAFKA": broker}
        audit = subprocess.Popen(
            [sys.executable, "-c", TOLD_OF_CTRL_C, "audit", "desk-1"],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        silent_broker.settimeout(30)
        with silent_broker.accept()[0]:
            audit.send_signal(signal.SIGINT)
            printed, _ = audit.communicate(timeout=30)
    assert (audit.returncode, printed) == (130, "")


# It imports no more than Python itself has before it calls the tool, and 2 is SIGINT.
CTRL_C_AT_IMPORT = """
import os, sys
left = int(sys.argv.pop(1))
class Imports:
    def find_spec(self, *_):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), 2)
sys.meta_path.insert(0, Imports())
from forgemq_launcher.command_line import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("imports", [3, 4, 10, 30, 100, 200])
def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_traceback(tmp_path, imports):
    """The first two imports find the file of the tool, so nothing of it can catch them."""
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C_AT_IMPORT, str(imports), "runs"],
        env={**os.environ, "FORGEMQ_LAUNCHER_RUNS": str(tmp_path), "FORGEMQ_KAFKA": ""},
        preexec_fn=heed_ctrl_c,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def heed_ctrl_c() -> None:
    """A shell's background ignores it, and so does what is started there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


LOADED_BY = """
import sys
from forgemq_launcher.command_line import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "unneeded"),
    [
        ("--help", {"asyncio", "rich.console", "aiokafka", "forgemq_contracts.run"}),
        ("runs", {"aiokafka", "fsspec", "tokenizers", "numpy"}),
    ],
)
def test_help_and_the_list_of_runs_import_no_broker_client(tmp_path, command, unneeded):
    done = subprocess.run(
        [sys.executable, "-c", LOADED_BY, command],
        env={**os.environ, "FORGEMQ_LAUNCHER_RUNS": str(tmp_path), "FORGEMQ_KAFKA": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stderr.split())
    assert ("forgemq_launcher.arguments" in loaded, loaded & unneeded) == (True, set())


@pytest.mark.parametrize(
    ("called", "program"),
    [
        (".venv/bin/forgemq", ".venv/bin/forgemq"),
        ("/opt/my venv/bin/forgemq", "'/opt/my venv/bin/forgemq'"),
        ("/opt/lib/forgemq_launcher/__main__.py", "forgemq"),
    ],
)
def test_a_run_is_continued_by_the_command_and_the_file_that_started_it(called, program):
    assert resume_command(called, file=Path("my_run.toml"), run="sums-1") == (
        f"{program} run my_run.toml --resume sums-1"
    )
