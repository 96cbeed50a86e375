"""Where the admin key of a launched run is, and who gets it."""

import subprocess
from pathlib import Path

import msgspec
import pytest

from forgemq_launcher.commands.own_gateway import run_gateway
from forgemq_launcher.run_folder import RunFolder, RunFolderError
from forgemq_launcher.run_key import console_key_file, run_key
from forgemq_launcher.upkeep.services import service_specs
from tests.unit.launcher.test_services import ADDRESSES, GIVEN, PLAYED, configuration

NEW = "a-newer-key-of-the-run"


def test_a_run_makes_its_key_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    key = run_key(folder, {})
    assert key.present() == run_key(folder, {}).present()
    assert len(key.present()) == 32
    assert folder.key_path.stat().st_mode & 0o777 == 0o600
    assert NEW not in key.present()


def test_a_key_that_is_put_in_front_is_the_runs_key_from_then_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    key = run_key(folder, {})
    folder.key_path.write_text(f"{NEW}\n{key.present()}\n")
    assert key.present() == run_key(folder, {}).present() == NEW
    shell = subprocess.run(
        ["bash", "-c", f"echo {key.in_shell}"], capture_output=True, text=True, check=True
    )
    assert shell.stdout == f"{NEW}\n"


def test_a_setting_has_the_key_or_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{NEW}\n")
    named = {"FORGEMQ_GATEWAY_ADMIN_KEY_FILE": str(file)}
    assert run_key(RunFolder(tmp_path), named).present() == NEW
    given = {**named, "FORGEMQ_GATEWAY_ADMIN_KEY": "the-key-of-the-setting"}
    assert run_key(RunFolder(tmp_path), given).present() == "the-key-of-the-setting"
    assert not (tmp_path / "admin.key").exists()
    file.unlink()
    with pytest.raises(RunFolderError, match="No such file"):
        run_key(RunFolder(tmp_path), named).present()


def test_a_command_for_a_named_gateway_takes_the_first_key_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{NEW}\nan-older-key-of-the-run\n")
    environ = {
        "FORGEMQ_AGENTS_GATEWAY_URL": "http://gateway:8000/",
        "FORGEMQ_AGENTS_ADMIN_KEY_FILE": str(file),
    }
    found = run_gateway(RunFolder(tmp_path), environ, host="127.0.0.1")
    assert (found.url, found.admin_key) == ("http://gateway:8000", NEW)


def test_a_command_for_a_run_up_here_speaks_tls_if_its_gateway_does(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.keep(configuration(PLAYED))
    folder.keep_gateway_port(41)
    environ = {"FORGEMQ_GATEWAY_TLS_CERTIFICATE_FILE": "server.pem"}
    with folder.locked():
        assert run_gateway(folder, environ, host="here.example").url == "https://here.example:41"
        assert run_gateway(folder, {}, host="127.0.0.1").url == "http://127.0.0.1:41"


def test_a_key_of_the_runs_file_is_in_no_environment(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    key = run_key(folder, {})
    made = service_specs(
        configuration(PLAYED),
        folder=folder,
        addresses=msgspec.structs.replace(
            ADDRESSES, admin_key=key.setting, admin_key_file=key.file
        ),
        environ=GIVEN,
    )
    assert not [spec.name for spec in made if key.present() in " ".join(spec.environ.values())]
    named = {spec.name for spec in made if str(folder.key_path) in spec.environ.values()}
    assert named == {"gateway", "agents"}


def test_a_page_that_other_machines_reach_gets_a_key_which_is_made_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    file = console_key_file(folder, {}, host="0.0.0.0")
    key = Path(file).read_text()
    assert (file, len(key)) == (str(tmp_path / "console.key"), 32)
    assert Path(file).stat().st_mode & 0o777 == 0o600
    assert console_key_file(folder, {}, host="10.0.0.1") == file
    assert Path(file).read_text() == key != run_key(folder, {}).present()
    made = service_specs(
        configuration(PLAYED),
        folder=folder,
        addresses=msgspec.structs.replace(ADDRESSES, console_key_file=file),
        environ=GIVEN,
    )
    assert [spec.name for spec in made if file in spec.environ.values()] == ["console"]


def test_a_page_on_loopback_or_with_a_key_of_its_settings_gets_none(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert console_key_file(folder, {}, host="127.0.0.1") == ""
    for name in ("FORGEMQ_CONSOLE_KEY", "FORGEMQ_CONSOLE_KEY_FILE"):
        assert console_key_file(folder, {name: "set"}, host="0.0.0.0") == ""
    assert not folder.console_key_path.exists()
