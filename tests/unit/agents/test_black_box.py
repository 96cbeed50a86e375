"""Programs as agents: environment, result, failures, and their end."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
from msgspec import UNSET, Raw

from forgemq_agents.black_box import OUTPUT_BYTES_KEPT, black_box
from forgemq_agents.episode import Episode
from forgemq_agents.errors import AgentFailedError, PolicyFailedError
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.requests import JsonRequests, Retry
from forgemq_contracts.admin import Claim
from forgemq_telemetry import Telemetry

CLAIM = Claim(
    episode_id="g.0.0",
    group_id="g",
    index=0,
    attempt=0,
    key="sk-episode",
    base_url="http://127.0.0.1:9/v1",
    session_url="http://127.0.0.1:9/s/sk-episode/v1",
    lease_s=60,
    task=Raw(b'{"word":"hello"}'),
    temperature=1.0,
)

SILENT = Telemetry(service="agents")


@pytest.fixture
async def episode():
    async with aiohttp.ClientSession() as http:
        requests = JsonRequests(http, retry=Retry())
        gateway = GatewayClient(requests, url="http://127.0.0.1:9", admin_key="secret")
        environ = {"PATH": os.environ["PATH"], "FORGEMQ_AGENTS_ADMIN_KEY": "secret", "HOME": "/h"}
        yield Episode(CLAIM, gateway=gateway, requests=requests, environ=environ, telemetry=SILENT)


def python(program: str, *arguments: str, timeout_s: float = 20):
    return black_box((sys.executable, "-c", program, *arguments), timeout_s=timeout_s)


async def test_a_program_finds_the_model_and_the_task_and_leaves_its_result(episode):
    program = (
        "import json, os, sys\n"
        "task = json.load(open(os.environ['FORGEMQ_TASK_FILE']))\n"
        "names = ['OPENAI_BASE_URL', 'OPENAI_API_KEY', 'ANTHROPIC_BASE_URL', 'ANTHROPIC_API_KEY']\n"
        "result = {'task': task, 'given': sys.argv[1:], **{n: os.environ[n] for n in names}}\n"
        "json.dump(result, open(os.environ['FORGEMQ_RESULT_FILE'], 'w'))\n"
    )
    await python(program, "{base_url}", "--key={key}", "{session_url}")(episode)
    assert episode.result == {
        "task": {"word": "hello"},
        "given": [CLAIM.base_url, "--key=sk-episode", CLAIM.session_url],
        "OPENAI_BASE_URL": CLAIM.base_url,
        "OPENAI_API_KEY": "sk-episode",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9",
        "ANTHROPIC_API_KEY": "sk-episode",
    }


async def test_a_program_never_sees_the_admin_key(episode):
    await python("import os; print(sorted(os.environ.items()))")(episode)
    assert "secret" not in episode.result["output"]
    assert "'HOME', '/h'" in episode.result["output"]


async def test_a_program_that_fails_masks_the_episode_with_its_last_output(episode):
    with pytest.raises(AgentFailedError, match=r"status 3: .*no luck"):
        await python("import sys; print('no luck'); sys.exit(3)")(episode)


async def test_out_of_time_masks_or_truncates_as_its_author_says(episode):
    slow = (sys.executable, "-c", "import time; time.sleep(60)")
    with pytest.raises(AgentFailedError, match=r"no end after 0.2 s"):
        await black_box(slow, timeout_s=0.2)(episode)
    assert episode.truncated_by is UNSET
    await black_box(slow, timeout_s=0.2, truncates_at_timeout=True)(episode)
    assert (episode.truncated_by, episode.result) == ("out_of_time", {"output": ""})


@pytest.mark.parametrize(
    ("said", "cause"), [('"too_many_turns"', "too_many_turns"), ("null", None)]
)
async def test_a_program_says_in_its_result_which_limit_ended_the_episode(episode, said, cause):
    await python(f"""open('{{result_file}}', 'w').write('{{"n": 1, "truncated_by": {said}}}')""")(
        episode
    )
    assert (episode.truncated_by, episode.result) == (cause, {"n": 1})


@pytest.mark.parametrize(
    ("status", "written", "cause", "result"),
    [
        (3, "", "declared", {"output": "no luck\n"}),
        (3, '{"n": 1}', "declared", {"n": 1}),
        (3, '{"n": "\\ud83d"}', "declared", {"n": "\ufffd"}),
        (3, '{"n": ', "declared", {}),
        (3, '{"n": "\udcff"}', "declared", {}),
        (3, '{"n": 1, "truncated_by": "out_of_time"}', "out_of_time", {"n": 1}),
        (1, '{"n": 1, "truncated_by": "declared"}', "declared", {"n": 1}),
    ],
)
async def test_a_program_that_fails_says_that_the_policy_was_why(
    episode, status, written, cause, result
):
    opened = "open('{result_file}', 'w', errors='surrogateescape')"  # Also bytes that are no UTF-8.
    program = f"{opened}.write({written!r})\n" if written else ""
    program += f"print('no luck')\nraise SystemExit({status})"
    command = (sys.executable, "-c", program)
    with pytest.raises(PolicyFailedError, match=f"status {status}: no luck"):
        await black_box(command, timeout_s=20, policy_statuses=(3, 4))(episode)
    assert (episode.truncated_by, episode.result) == (cause, result)


@pytest.mark.parametrize(
    ("status", "written"),
    [(1, ""), (1, '{"n": 1}'), (3, '{"truncated_by": null}'), (1, '{"truncated_by": "boredom"}')],
)
async def test_a_program_that_fails_and_does_not_say_so_masks_the_episode(episode, status, written):
    program = f"open('{{result_file}}', 'w').write({written!r})\n" if written else ""
    command = (sys.executable, "-c", f"{program}raise SystemExit({status})")
    with pytest.raises(AgentFailedError, match=f"status {status}"):
        await black_box(command, timeout_s=20, policy_statuses=(3,))(episode)
    assert episode.truncated_by is UNSET


async def test_a_program_that_a_signal_ends_masks_the_episode(episode):
    program = "import os; os.kill(os.getpid(), 9)"
    with pytest.raises(AgentFailedError, match="status -9"):
        await python(program)(episode)


async def test_a_limit_that_no_contract_names_masks_with_those_that_are(episode):
    program = """open('{result_file}', 'w').write('{"truncated_by": "boredom"}')"""
    with pytest.raises(
        AgentFailedError,
        match=r"truncated_by in its result: must be one of context_full, .*boredom",
    ):
        await python(program)(episode)
    assert episode.truncated_by is UNSET


async def test_a_result_that_is_not_json_masks_the_episode(episode):
    with pytest.raises(AgentFailedError, match="not JSON"):
        await python("open({!r}, 'w').write('{')".replace("{!r}", "'{result_file}'"))(episode)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "fault"),
    [
        ("os.mkfifo(path)", "pipe"),
        ("os.symlink('/dev/zero', path)", "device"),
        ("os.mkdir(path)", "folder"),
        ("os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 2**40)", "at most 16777216 bytes"),
    ],
)
async def test_a_result_that_is_no_file_or_too_long_masks_its_episode_alone(episode, made, fault):
    """A policy with a shell can make it: a read of it must not hold up or fill this process."""
    program = f"import os; path = os.environ['FORGEMQ_RESULT_FILE']; {made}"
    with pytest.raises(AgentFailedError, match=fault):
        await python(program)(episode)


@pytest.mark.slow
async def test_a_program_that_takes_too_long_is_stopped_with_its_children(episode, tmp_path):
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(AgentFailedError, match="no end after 1 s"):
        await python(program, timeout_s=1)(episode)
    assert not await is_alive(int((tmp_path / "child").read_text()))


async def test_a_cancelled_episode_stops_its_program(episode, tmp_path):
    program = (
        "import os, time\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    playing = asyncio.ensure_future(python(program)(episode))
    await written(tmp_path / "pid")
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert not await is_alive(int((tmp_path / "pid").read_text()))


async def test_a_program_that_ignores_sigterm_ends_although_its_episode_is_cancelled_twice(
    episode, tmp_path
):
    program = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    playing = asyncio.ensure_future(python(program)(episode))
    await written(tmp_path / "pid")
    playing.cancel()  # By the lease: the episode is over.
    await asyncio.sleep(0.05)
    playing.cancel()  # By the group: it retired.
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert not await is_alive(int((tmp_path / "pid").read_text()))


async def written(path: Path) -> None:
    """Wait until the file has a content, for ten seconds at most."""
    for _ in range(500):
        if is_written(path):
            return
        await asyncio.sleep(0.02)


def is_written(path: Path) -> bool:
    """Whether the file is there and not empty."""
    return path.exists() and bool(path.read_text())


async def is_alive(pid: int) -> bool:
    """Whether the process still runs 20 s later; a busy machine may take a while to end it."""
    for _ in range(1000):
        if not is_running(pid):
            return False
        await asyncio.sleep(0.02)
    return True


def is_running(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def test_a_program_that_prints_without_end_fills_no_disk_and_its_last_output_is_kept(
    episode,
):
    """8 MiB; the program also says how large its own folder is meanwhile."""
    program = (
        "import os\n"
        "chunk = b'x' * 2**20\n"
        "for _ in range(64):\n"
        "    os.write(1, chunk[:2**16]) and os.write(2, chunk[:2**16])\n"
        "kept = sum(e.stat().st_size for e in os.scandir('.'))\n"
        "print(f'folder {kept} the end', flush=True)\n"
    )
    await python(program)(episode)
    output = episode.result["output"]
    assert len(output) == OUTPUT_BYTES_KEPT
    assert int(output.split()[-3]) < 1000
    assert output.endswith("the end\n")


async def test_a_process_that_leaves_the_group_and_keeps_the_output_holds_up_no_episode(
    episode, tmp_path
):
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " start_new_session=True)\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "print('done', flush=True)\n"
    )
    await python(program, timeout_s=10)(episode)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert episode.result == {"output": "done\n"}


def test_status_0_cannot_say_that_a_program_failed():
    with pytest.raises(ValueError, match="policy_statuses must not have 0"):
        black_box(("true",), timeout_s=1, policy_statuses=(0, 3))


def test_a_command_must_name_a_program():
    with pytest.raises(ValueError, match="command must name a program"):
        black_box((), timeout_s=1)
