"""Fetches the jars of Apache Kafka, once per user, with jgo; checks each against the lock.

The lock (`kafka.lock`, in the format of sha256sum) names all 46 jars. Its roots are kafka and
slf4j-simple. With log4j as a root, jgo takes versions from log4j's parent and installs an older
kafka-clients than the server needs, which fails with NoSuchMethodError.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

KAFKA_VERSION = "4.2.0"
FETCH_TIMEOUT_S = 600.0  # 43 MB; minutes only on a very slow line.
POLL_S = 0.1  # How late the end of jgo, or `abandoned`, is seen.
COORDINATES = (f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}", "org.slf4j:slf4j-simple:1.7.36")

Progress = Callable[[str], None]


class JarsError(Exception):
    """The jars cannot be fetched, or differ from the lock."""


def locked_jars() -> dict[str, str]:
    """sha256 of every jar of the broker, by file name."""
    text = resources.files("forgemq_bus.broker").joinpath("kafka.lock").read_text()
    return {name: sha256 for sha256, name in (line.split() for line in text.splitlines())}


def lock_digest() -> str:
    """Hash of the lock, which names its folder in the cache."""
    return hashlib.sha256(repr(sorted(locked_jars().items())).encode()).hexdigest()[:16]


def jars_folder(
    cache: Path, *, progress: Progress, abandoned: threading.Event | None = None
) -> Path:
    """The folder with exactly the locked jars; fetches them if the cache lacks them.

    Args:
        cache: Folder of this user's caches; created if it is missing.
        progress: Called with one line before something slow.
        abandoned: Set from another thread to stop at once.

    Raises:
        JarsError: the jars cannot be fetched, one differs from the lock, or it was abandoned.
    """
    jars = locked_jars()
    folder = cache / f"kafka-{KAFKA_VERSION}-{lock_digest()}"
    if not folder.is_dir():
        progress(f"fetching Apache Kafka {KAFKA_VERSION} (43 MB, once per user)")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".fetching-") as temporary:
            _fetch(Path(temporary), jars, abandoned=abandoned or threading.Event())
            _publish(Path(temporary) / "checked", folder)
    missing = sorted(name for name in jars if not (folder / name).is_file())
    if missing:
        raise JarsError(f"{folder} lacks {missing[0]}: remove the folder, it is fetched again")
    return folder


def _fetch(temporary: Path, jars: dict[str, str], *, abandoned: threading.Event) -> None:
    """Run jgo, check the jars of the lock and copy them to `temporary/checked`."""
    coordinates = ", ".join(f'"{name}"' for name in COORDINATES)
    (temporary / "jgo.toml").write_text(
        '[environment]\nname = "kafka"\n'
        f"[dependencies]\ncoordinates = [{coordinates}]\n"
        '[entrypoints]\nmain = "kafka.Kafka"\ndefault = "main"\n'
    )
    output = temporary / "jgo.log"
    code = _run_jgo(temporary, output, abandoned=abandoned)
    if code != 0:
        lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
        raise JarsError("cannot fetch the Kafka jars: " + " | ".join(lines[-3:]))
    found = {path.name: path for path in (temporary / "environment").rglob("*.jar")}
    (temporary / "checked").mkdir()
    for name, sha256 in jars.items():
        if name not in found:
            raise JarsError(f"jgo did not resolve {name}, which the lock names")
        if hashlib.sha256(found[name].read_bytes()).hexdigest() != sha256:
            raise JarsError(f"{name} is not the file of the lock: its sha256 differs")
        shutil.copy(found[name], temporary / "checked" / name)


def _run_jgo(temporary: Path, output: Path, *, abandoned: threading.Event) -> int:
    """Run jgo, with its output in the file `output`; returns its exit status."""
    command = [sys.executable, "-m", "jgo", "--resolver", "python", "--links", "copy"]
    command += ["--repo-cache", "repository", "--cache-dir", "environment", "sync"]
    deadline_s = time.monotonic() + FETCH_TIMEOUT_S
    with (
        output.open("wb") as log,
        subprocess.Popen(
            command,
            cwd=temporary,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C in the terminal goes to the owner, who sets `abandoned`.
            start_new_session=True,
        ) as process,
    ):
        while (code := process.poll()) is None:
            is_late = time.monotonic() > deadline_s
            if is_late or abandoned.wait(POLL_S):
                process.kill()
                why = f"took over {FETCH_TIMEOUT_S:.0f} s" if is_late else "was abandoned"
                raise JarsError(f"fetching the Kafka jars {why}")
        return code


def _publish(checked: Path, folder: Path) -> None:
    try:
        checked.rename(folder)
    except OSError:
        if not folder.is_dir():  # Else another process was faster, with the same jars.
            raise
