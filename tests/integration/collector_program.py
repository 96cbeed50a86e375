"""An OpenTelemetry collector, compiled from its Go modules: `collector/main.go` names its parts.

`python -m tests.integration.collector_program` compiles it if it is not there; it installs nothing.
"""

import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

VERSION = "v0.150.0"
SOURCE = Path(__file__).parent / "collector"
PROGRAM = Path(__file__).parents[2] / f".cache/collector/otelcol-{VERSION}"
HOW_TO_GET = (
    "no OpenTelemetry collector: .venv/bin/python -m tests.integration.collector_program compiles "
    "one, with Go 1.25 or later"
)
READY_WITHIN_S = 60.0
"""It takes a second on an idle machine."""


def compile_program() -> None:
    """Put the collector's program where the tests look for it."""
    if PROGRAM.is_file():
        return
    if shutil.which("go") is None:
        raise SystemExit("the collector needs Go 1.25 or later (https://go.dev/dl)")
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["go", "build", "-trimpath", "-ldflags", "-s -w", "-o", str(PROGRAM), "."],
        cwd=SOURCE,
        env={**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false"},
        check=True,
    )


@contextmanager
def running_collector(
    folder: Path, configuration: Mapping[str, object], *, metrics_url: str
) -> Iterator[None]:
    """A collector with this configuration, until the end of the block.

    Args:
        folder: Gets its configuration and its log.
        configuration: As in its YAML file.
        metrics_url: Answers when it is up.
    """
    path = folder / "collector.yml"
    path.write_text(yaml.safe_dump(dict(configuration)), encoding="utf-8")
    with (folder / "collector.log").open("wb") as log:
        collector = subprocess.Popen(
            [str(PROGRAM), f"--config=file:{path}"], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        _wait_until_up(metrics_url, collector, log=folder / "collector.log")
        yield
    finally:
        collector.terminate()
        collector.wait(30)


def _wait_until_up(url: str, collector: "subprocess.Popen[bytes]", *, log: Path) -> None:
    deadline_s = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline_s:
        assert collector.poll() is None, log.read_text(encoding="utf-8")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise AssertionError(f"no answer within {READY_WITHIN_S:g} s: {log.read_text()}")


if __name__ == "__main__":
    compile_program()
