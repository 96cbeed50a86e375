"""Installs the clients at their pinned versions into `.cache/clients`, each into its own folder.

Run as `python -m tests.clients.install`; names of locks choose some. A client that cannot be
installed is named with the reason, its tests fail with the same reason, and the others are still
installed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCKS = Path(__file__).parent / "locks"
CACHE = ROOT / ".cache" / "clients"
_INSTALL_S_MAX = 600
_REASON_CHARACTERS = 600


def packages() -> list[str]:
    """Names of all locks: a folder for Node.js, a requirements file for Python."""
    return sorted(path.stem for path in LOCKS.iterdir())


def folder_of(package: str) -> Path:
    return CACHE / package


def missing(package: str) -> str:
    """Why the package cannot be used; "" if it is installed as its lock says."""
    folder = folder_of(package)
    if (folder / "installed").exists():
        is_current = (folder / "installed").read_text() == _digest(package)
        return "" if is_current else f"{package} is installed from an older lock: make test-clients"
    if (folder / "failed").exists():
        return (folder / "failed").read_text()
    return f"{package} is not installed: make test-clients"


def install(package: str) -> str:
    """Install one package if it is missing; "" or why it could not be installed."""
    if not missing(package):
        return ""
    folder = folder_of(package)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    lock = LOCKS / package
    try:
        (_install_node if lock.is_dir() else _install_python)(lock, folder)
    except subprocess.CalledProcessError as failed:
        reason = f"{package} could not be installed: {failed.stderr[-_REASON_CHARACTERS:]}"
    except (subprocess.TimeoutExpired, FileNotFoundError) as failed:
        reason = f"{package} could not be installed: {failed}"
    else:
        (folder / "installed").write_text(_digest(package))
        return ""
    (folder / "failed").write_text(reason)
    return reason


def _install_node(lock: Path, folder: Path) -> None:
    for name in ("package.json", "package-lock.json"):
        shutil.copy(lock / name, folder / name)
    # `npm ci` refuses a lock without the packages of other machines, which a mirror may not have.
    install = ("npm", "install", "--no-save", "--fetch-retries=0")
    _run(*install, "--no-audit", "--no-fund", "--loglevel=error", cwd=folder)


def _install_python(lock: Path, folder: Path) -> None:
    uv = Path(sys.executable).parent / "uv"
    _run(str(uv), "venv", "-q", "--python", sys.executable, str(folder / "venv"), cwd=folder)
    python = folder / "venv" / "bin" / "python"
    requirements = str(lock.with_suffix(".txt"))
    _run(str(uv), "pip", "install", "-q", "--python", str(python), "-r", requirements, cwd=folder)


def _run(*argv: str, cwd: Path) -> None:
    subprocess.run(
        argv, cwd=cwd, check=True, capture_output=True, text=True, timeout=_INSTALL_S_MAX
    )


def _digest(package: str) -> str:
    lock = LOCKS / package
    file = lock / "package-lock.json" if lock.is_dir() else lock.with_suffix(".txt")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main(names: list[str]) -> int:
    """Install these packages, or all; 0, because the tests of one that failed say so."""
    for package in names or packages():
        problem = install(package)
        sys.stdout.write(f"clients: {problem or package + ' is installed'}\n")
    return 0


if __name__ == "__main__":
    os.nice(5)
    sys.exit(main(sys.argv[1:]))
