"""A stand-in engine in its own process, so that it outlives a run's services."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.integration.launched_run import ROOT


@contextmanager
def stand_in_engine(*, latency_s: float, tokens: int) -> Iterator[str]:
    """Run a stand-in engine; yields its URL, and ends the process by its id."""
    arguments = ("--port", "0", "--latency-s", str(latency_s), "--tokens", str(tokens))
    process = subprocess.Popen(
        [sys.executable, "loadtests/stand_in_engine.py", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        found = re.search(r"http://\S+", said)
        assert found, f"no stand-in engine: {said!r}"
        yield found[0]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
