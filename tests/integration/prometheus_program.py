"""A real Prometheus for tests that ask it."""

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

from forgemq_settings.ports import free_port


@contextmanager
def running_prometheus(folder: Path, configuration: Mapping[str, object]) -> Iterator[str]:
    """A Prometheus with this configuration, its data below the folder; yields its address."""
    (folder / "prometheus.yml").write_text(yaml.safe_dump(dict(configuration)), encoding="utf-8")
    port = free_port()
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)
