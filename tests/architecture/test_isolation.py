"""Services load neither torch nor exporters without need, and declare all that they import."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The one that `make setup` installed, never one of the machine.
UV = Path(sys.executable).with_name("uv")
LIGHT = (
    "agents",
    "auditor",
    "console",
    "gateway",
    "inference",
    "launcher",
    "merger",
    "reward",
    "scheduler",
)
HEAVY = ("torch", "sglang", "transformers", "vllm", "triton", "tensorflow", "jax")
EXPORTING = ("opentelemetry.sdk", "opentelemetry.exporter", "prometheus_client")

IMPORT_ALL = """
import importlib, pkgutil, sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {heavy!r}:
            raise ImportError(f"{{name}} is not allowed here")
        return None

sys.meta_path.insert(0, Refused())
for name in {packages!r}:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
loaded = sorted(set({heavy!r}) & set(sys.modules))
loaded += [name for name in sys.modules if name.startswith({exporting!r})]
assert not loaded, loaded
print("imported", *[name for name in {packages!r} if name + ".app" in sys.modules])
"""


def import_all(python: Path | str, services: Sequence[str], *, timeout_s: float) -> list[str]:
    """Import every module of these services in one fresh process.

    Returns:
        The packages whose `app` was imported.
    """
    packages = tuple(f"forgemq_{service}" for service in services)
    script = IMPORT_ALL.format(packages=packages, heavy=HEAVY, exporting=EXPORTING)
    done = subprocess.run(
        [python, "-c", script], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()[1:]


@pytest.mark.slow
def test_light_services_import_without_torch_and_without_an_exporters_sdk():
    """All in one process: what any of them loads is seen, and what they share is loaded once."""
    imported = import_all(sys.executable, LIGHT, timeout_s=60)
    assert imported == [f"forgemq_{service}" for service in LIGHT]


def test_a_heavy_import_is_caught():
    script = IMPORT_ALL.format(
        packages=("forgemq_contracts",), heavy=(*HEAVY, "msgspec"), exporting=EXPORTING
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "msgspec is not allowed here" in done.stderr


def workspace() -> dict[str, Path]:
    """Folder of every distribution of the workspace, by name."""
    folders = [ROOT / "contracts", *(ROOT / "libs").iterdir(), *(ROOT / "services").iterdir()]
    return {
        tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "name"
        ]: folder
        for folder in folders
        if (folder / "pyproject.toml").exists()
    }


def own_folders(name: str, known: dict[str, Path]) -> set[Path]:
    """The distribution and all workspace distributions that it depends on."""
    project = tomllib.loads((known[name] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[\[<>=!~; ]", need)[0] for need in project["dependencies"]}
    return {known[name]}.union(*(own_folders(n, known) for n in sorted(names & set(known))))


def environment_of(name: str, folder: Path) -> Path:
    """Make an environment with only what the service declares, in the locked versions.

    Returns:
        Its folder of programs.
    """
    programs = folder / "venv" / "bin"
    subprocess.run(
        [UV, "venv", "--quiet", "--python", sys.executable, str(folder / "venv")],
        check=True,
        timeout=120,
    )
    # Constraints fix versions without requiring every package, so the hashes are left out.
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    pins = re.findall(r"^([A-Za-z0-9._-]+==[^\s;\\]+)", lock, flags=re.MULTILINE)
    (folder / "constraints.txt").write_text("\n".join(pins) + "\n", encoding="utf-8")
    folders = sorted(own_folders(f"forgemq-{name}", workspace()))
    subprocess.run(
        [UV, "pip", "install", "--quiet", "--python", str(programs / "python")]
        + ["--constraint", str(folder / "constraints.txt")]
        + ["--override", str(ROOT / "overrides.txt")]
        + [argument for folder in folders for argument in ("-e", str(folder))],
        check=True,
        timeout=500,
    )
    return programs


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("service", sorted({*LIGHT} - {"launcher"}))
def test_a_light_service_installs_and_imports_with_its_own_dependencies_only(
    service: str, tmp_path: Path
):
    python = environment_of(service, tmp_path) / "python"
    assert import_all(python, [service], timeout_s=60) == [f"forgemq_{service}"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_launcher_announces_runs_without_an_engine_beside_it(tmp_path: Path):
    """The launcher's image has no engine; `create` gets as far as the settings that are missing."""
    tool = environment_of("launcher", tmp_path) / "forgemq"
    done = subprocess.run(
        [tool, "create", "deploy/demo/run.toml", "run=r"],
        cwd=ROOT,
        env={"PATH": str(tool.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = "forgemq: FORGEMQ_BLOBS: must be set: where all services reach the blob store\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
