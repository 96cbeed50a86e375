"""A run started as a user starts it, and every process that it brings up."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

Found = TypeVar("Found")

ROOT = Path(__file__).parents[2]
FORGEMQ = Path(sys.executable).with_name("forgemq")
DIALOGUE = "tests/integration/dialogue/run.toml"
DEMO = "deploy/demo/run.toml"
SHOWN_CHARACTERS_MAX = 6000
LOOK_EVERY_S = 0.2

MARK = "LAUNCHED_BY_TEST"
"""Variable that every process of a run inherits: ForgeMQ's own are kept from some."""


class LaunchedRun:
    """One run id with its own folder, over all its starts.

    Lifecycle: `start`, `wait_for_line`, break it, `start` again with --resume, `wait_for_end`, and
    `close`, which kills by process id what is still there.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.runs = folder / "runs"
        runs = str(self.runs)
        self.environ = {**os.environ, **environ, "FORGEMQ_LAUNCHER_RUNS": runs, MARK: runs}
        self._output = folder / "terminal.log"
        self._launcher: subprocess.Popen[bytes] | None = None
        self._read_from = 0
        self._seen: set[psutil.Process] = set()

    def start(self, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        """Run `forgemq run ARGUMENTS` in a new session; `output` begins here."""
        self._read_from = self._output.stat().st_size if self._output.exists() else 0
        with self._output.open("ab") as output:
            self._launcher = subprocess.Popen(
                [str(FORGEMQ), "run", *arguments],
                cwd=ROOT,
                env={**self.environ, **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def launcher(self) -> subprocess.Popen[bytes]:
        """The newest start's process."""
        assert self._launcher is not None, "start comes first"
        return self._launcher

    def output(self) -> str:
        """What the newest start printed so far."""
        with self._output.open("rb") as output:
            output.seek(self._read_from)
            return output.read().decode(errors="replace")

    def story(self) -> str:
        """The end of all that was printed, for the message of a failed assertion."""
        return self._output.read_text(errors="replace")[-SHOWN_CHARACTERS_MAX:]

    def wait_for_line(self, pattern: str, *, within_s: float) -> re.Match[str]:
        """Wait for a match in the output of this start; one that is there already counts."""

        def found() -> re.Match[str] | None:
            return re.search(pattern, self.output(), flags=re.MULTILINE)

        return self._wait_for(found, within_s=within_s, what=f"it prints {pattern!r}")

    def wait_for_log(
        self, run_id: str, service: str, pattern: str, *, within_s: float
    ) -> re.Match[str]:
        """Wait for a match in a service's log over all its starts; a dot matches line ends."""
        log = self.runs / run_id / "logs" / f"{service}.log"

        def found() -> re.Match[str] | None:
            text = log.read_text(errors="replace") if log.exists() else ""
            return re.search(pattern, text, flags=re.DOTALL)

        return self._wait_for(found, within_s=within_s, what=f"{service} logs {pattern!r}")

    def wait_for_end(self, *, within_s: float) -> int:
        """Wait for the launcher's exit status."""
        self._wait_for(
            lambda: self.launcher.poll() is not None, within_s=within_s, what="the launcher ends"
        )
        return self.launcher.wait()

    def interrupt(self) -> None:
        """Press Ctrl-C: send SIGINT to the launcher."""
        self._find_processes()
        self.launcher.send_signal(signal.SIGINT)

    def pid_of(self, service: str, *, within_s: float) -> int:
        """Wait for a service below the launcher; returns its process id."""

        def found() -> int | None:
            return next((p.pid for p in self._descendants() if _is_service(p, service)), None)

        return self._wait_for(found, within_s=within_s, what=f"{service} is up")

    def rank_pids(self, *, count: int, within_s: float) -> Sequence[int]:
        """Wait for all of the trainer's ranks; returns their process ids, by rank."""

        def found() -> Sequence[int] | None:
            ranks = {_rank_of(process): process.pid for process in self._descendants()}
            ranks.pop(-1, None)
            return [ranks[rank] for rank in sorted(ranks)] if len(ranks) == count else None

        return self._wait_for(found, within_s=within_s, what=f"{count} ranks are up")

    def blobs(self, run_id: str) -> Path:
        """The run's blob store."""
        return self.runs / run_id / "blobs"

    def report(self, run_id: str) -> dict[str, Any]:
        """What the run wrote at its end."""
        parsed: dict[str, Any] = json.loads((self.runs / run_id / "report.json").read_text())
        return parsed

    def left_behind(self) -> list[str]:
        """Every process of this run that is alive, in words."""
        return [
            f"{process.pid} {' '.join(process.cmdline())[:120]}"
            for process in self._find_processes()
            if _is_alive(process)
        ]

    def close(self) -> None:
        """Kill what is left of all starts, and reap the launcher."""
        for process in self._find_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()

    def _wait_for(self, look: Callable[[], Found | None], *, within_s: float, what: str) -> Found:
        """Wait until `look` finds something; fail after `within_s`, or if the launcher ended."""
        deadline_s = time.monotonic() + within_s
        while True:
            is_over = self.launcher.poll() is not None
            found = look()
            if found:
                return found
            if is_over:
                status = self.launcher.returncode
                pytest.fail(f"ended with status {status} before {what}:\n{self.story()}")
            if time.monotonic() > deadline_s:
                pytest.fail(f"not within {within_s:.0f} s: {what}:\n{self.story()}")
            self._seen.update(self._descendants())
            time.sleep(LOOK_EVERY_S)

    def _descendants(self) -> Sequence[psutil.Process]:
        try:
            return psutil.Process(self.launcher.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return ()

    def _find_processes(self) -> set[psutil.Process]:
        """All processes of the run seen so far: by parent, by environment, by process group."""
        self._seen.update(self._descendants())
        groups = {process.pid for process in self._seen}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
                if os.getpgid(process.pid) in groups or self._is_marked(process):
                    self._seen.add(process)
        return self._seen

    def _is_marked(self, process: psutil.Process) -> bool:
        return process.environ().get(MARK) == str(self.runs)


def _is_service(process: psutil.Process, service: str) -> bool:
    try:
        return process.cmdline()[-1:] == [f"forgemq_{service}"]
    except psutil.NoSuchProcess:
        return False


def _rank_of(process: psutil.Process) -> int:
    """The rank that torchrun gave the process; -1 if it is not a rank of the trainer."""
    try:
        return int(process.environ().get("RANK", -1)) if _is_service(process, "trainer") else -1
    except psutil.NoSuchProcess:
        return -1


def _is_alive(process: psutil.Process) -> bool:
    # is_running compares start times, so another process with the same number does not count.
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def curves_of_the_demo(
    run: LaunchedRun, run_id: str, *overrides: str, steps: int
) -> list[dict[str, Any]]:
    """Play the demo to its end without held-out tasks; its curves, a row each step."""
    try:
        run.start(DEMO, f"run={run_id}", f"trainer.steps={steps}", "evaluation.tasks=0", *overrides)
        assert run.wait_for_end(within_s=1000) == 0, run.story()
    finally:
        run.close()
    lines = (run.runs / run_id / "curves.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
