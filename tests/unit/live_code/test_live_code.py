"""A service that runs from a copy of its code is started again with what changed there."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "deploy/kubernetes/components/live-code/run.py"
SERVICE = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ONE", *sys.argv[1:], flush=True)
signal.pause()
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    folder = tmp_path / "image"
    folder.mkdir()
    (folder / "module").write_text("service\n")
    (folder / "service.py").write_text(SERVICE)
    return folder


@contextmanager
def running(image: Path, copy: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(image), str(copy), "given"],
        env={**os.environ, "PYTHONPATH": str(copy)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_changed_file_of_the_copy_runs_after_sighup_in_the_same_process(image: Path):
    copy = image.parent / "code"
    with running(image, copy) as process:
        assert line(process) == "ONE given\n"
        (copy / "service.py").write_text(SERVICE.replace("ONE", "TWO, changed"))
        process.send_signal(signal.SIGHUP)
        assert line(process) == "TWO, changed given\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 7, "the service's own status"


def test_a_container_that_starts_again_goes_on_with_the_copy_and_not_with_half_of_one(image: Path):
    copy = image.parent / "code"
    with running(image, copy) as process:
        assert line(process) == "ONE given\n"
        (copy / "service.py").write_text(SERVICE.replace("ONE", "TWO, changed"))
    with running(image, copy) as process:
        assert line(process) == "TWO, changed given\n"
    half = image.parent / "half"
    half.with_name("half.draft").mkdir()
    with running(image, half) as process:
        assert line(process) == "ONE given\n"


def test_a_stop_is_a_stop_whatever_comes_behind_it(image: Path):
    with running(image, image.parent / "code") as process:
        assert line(process) == "ONE given\n"
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
        assert process.wait(30) in {7, 143}, "143: before it had said what to do at a signal"


def test_a_service_that_fails_ends_the_container(image: Path):
    (image / "service.py").write_text("raise SystemExit(3)")
    with running(image, image.parent / "code") as process:
        assert process.wait(30) == 3
