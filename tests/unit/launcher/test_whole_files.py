"""What a run's folder holds after its disk was full."""

from pathlib import Path

import pytest

from forgemq_launcher.run_folder import RunFolder
from tests.unit.launcher.test_run_end import full_disk
from tests.unit.run_view.synthetic import configuration


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "r")
    made.make(configuration())
    return made


def test_a_port_that_no_disk_takes_leaves_the_one_before(folder: RunFolder) -> None:
    folder.keep_gateway_port(8080)
    with full_disk(), pytest.raises(OSError, match="too large"):
        folder.keep_gateway_port(8081)
    assert folder.gateway_port() == 8080
    folder.keep_gateway_port(8081)
    assert folder.gateway_port() == 8081


def test_a_key_that_no_disk_takes_is_made_at_the_next_start(folder: RunFolder) -> None:
    with full_disk(), pytest.raises(OSError, match="too large"):
        folder.admin_key()
    assert folder.admin_key() == folder.admin_key()
    assert folder.key_path.stat().st_mode & 0o777 == 0o600


def test_a_configuration_that_no_disk_takes_leaves_the_one_before(folder: RunFolder) -> None:
    with full_disk(), pytest.raises(OSError, match="too large"):
        folder.keep(configuration(steps=9))
    assert folder.configuration() == configuration()
