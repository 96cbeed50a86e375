"""What the user's code gets of a process: no credential, neither its own nor its parent's."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forgemq_settings.user_code import for_user_code, taken_from
from tests.hostile_program import NOTHING, SECRETS

HOSTILE = Path(__file__).parents[2] / "hostile_program.py"
UNPRIVILEGED = HOSTILE.with_name("unprivileged.py")
KEPT = {
    "PATH": "/bin",
    "HOME": "/h",
    "JUDGE_KEY": "of the user",
    "GATEWAY_URL": "http://127.0.0.1:1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318",
    "MY_FORGEMQ_X": "1",
    "SSL_CERT_FILE": "/ca.pem",
}
STRIPPED = {
    **SECRETS,
    "FORGEMQ_KAFKA": "broker:9092",
    "AWS_ACCESS_KEY_ID": "k",
    "AWS_SESSION_TOKEN": "t",
    "AWS_PROFILE": "p",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": "u",
    "FSSPEC_S3_SECRET": "s",
    "FSSPEC_S3": "{}",
    "GOOGLE_APPLICATION_CREDENTIALS": "/f",
    "AZURE_STORAGE_CONNECTION_STRING": "c",
}

# A process that may hide, and then runs the hostile program, as services run the user's code.
PARENT = """
import os, subprocess, sys
from forgemq_settings.hidden_process import hide_process
from forgemq_settings.user_code import for_user_code

if sys.argv[1] == "hidden":
    hide_process()
subprocess.run([sys.executable, sys.argv[2]], env=for_user_code(os.environ), check=True)
"""


def test_credentials_of_the_run_are_left_out_and_all_else_is_kept() -> None:
    assert for_user_code({**KEPT, **STRIPPED}) == KEPT


def test_what_is_taken_is_not_inherited_any_more() -> None:
    environ = {**KEPT, **STRIPPED}
    assert taken_from(environ) == {**KEPT, **STRIPPED}
    assert environ == KEPT


def hostile_finds(how: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, str(UNPRIVILEGED), sys.executable, "-c", PARENT, how, str(HOSTILE)],
        env={**os.environ, **SECRETS},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="hides on Linux only")
def test_a_program_reads_its_parents_secrets_only_if_that_one_does_not_hide() -> None:
    secrets = sorted(value.removeprefix("key=") for value in SECRETS.values())
    assert hostile_finds("plain") == {"own": [], "environ": secrets, "memory": secrets}
    assert hostile_finds("hidden") == NOTHING


def reads(pid: int) -> object:
    """What a program of the same user, which is not root, finds in a process's environment."""
    done = subprocess.run(
        [sys.executable, str(UNPRIVILEGED), sys.executable, str(HOSTILE), str(pid)],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    return json.loads(done.stdout)["environ"]


@pytest.mark.long  # Six services load.
@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="hides on Linux only")
def test_no_service_beside_trainer_and_inference_shows_its_environment() -> None:
    environ = {**os.environ, **SECRETS, "FORGEMQ_RUN": "r", "FORGEMQ_KAFKA": "127.0.0.1:9"}
    del environ["FORGEMQ_AGENTS_ADMIN_KEY"]
    waiting = {
        service: subprocess.Popen(
            [sys.executable, "-m", f"forgemq_{service}"], env=environ, stderr=subprocess.DEVNULL
        )
        for service in ("auditor", "console", "gateway", "merger", "reward", "scheduler")
    }
    seen = dict.fromkeys(waiting, object())
    try:
        until_s = time.monotonic() + 90
        while set(seen.values()) != {"PermissionError"} and time.monotonic() < until_s:
            time.sleep(0.5)
            assert {name: each.poll() for name, each in waiting.items()} == dict.fromkeys(waiting)
            seen = {name: str(reads(process.pid)) for name, process in waiting.items()}
    finally:
        for process in waiting.values():
            process.kill()
            process.wait()
    assert seen == dict.fromkeys(waiting, "PermissionError")
