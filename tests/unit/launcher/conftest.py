"""A run's folder, for the tests of several commands."""

from pathlib import Path

import msgspec
import pytest

from forgemq_launcher.run_folder import RunFolder
from tests.small_run import small_run


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    """The folder of a run with a broker of its own."""
    folder = RunFolder(tmp_path / "runs" / "desk-1")
    folder.make(msgspec.structs.replace(small_run(group_partitions=1), run="desk-1"))
    (folder / "kafka" / "ports.json").write_text('{"broker": 1}')
    return folder
