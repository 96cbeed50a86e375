"""How much memory the processes of a run may still take: the machine's, or less in a container."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct


class _Hierarchy(Struct, frozen=True):
    """Where a version of Linux's control groups says what a group may use.

    `file_cache`: fields of memory.stat that count what the kernel drops before it refuses memory.
    """

    mount: str
    limit: str
    usage: str
    file_cache: tuple[str, str]


_V1 = _Hierarchy(
    mount="sys/fs/cgroup/memory",
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    file_cache=("total_active_file", "total_inactive_file"),
)
_V2 = _Hierarchy(
    mount="sys/fs/cgroup",
    limit="memory.max",
    usage="memory.current",
    file_cache=("active_file", "inactive_file"),
)


def available_memory_bytes(*, root: Path = Path("/")) -> int:
    """Bytes that this process and its children may still take without swapping or being killed.

    The least of what is free on the machine and what each control group above this process has
    left of its limit; caches of files count as free.

    Args:
        root: Has the folders `proc` and `sys`.
    """
    free_kib = _fields(root / "proc/meminfo")["MemAvailable"]
    return max(0, min([free_kib * 1024, *_left_by_groups(root)]))


def _left_by_groups(root: Path) -> Iterator[int]:
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        hierarchy = _V1 if controllers else _V2
        group = Path(path.lstrip("/"))
        # A container may see its own group as the root, or by the path that the host gives it.
        for each in (group, *group.parents):
            left = _left(root / hierarchy.mount / each, hierarchy)
            if left is not None:
                yield left


def _left(group: Path, hierarchy: _Hierarchy) -> int | None:
    """Bytes left of a group's limit; None if it has none or is not shown here."""
    limit = group / hierarchy.limit
    text = limit.read_text().strip() if limit.is_file() else "max"
    if text == "max":
        return None
    used = int((group / hierarchy.usage).read_text())
    stat = _fields(group / "memory.stat")
    return int(text) - used + sum(stat.get(name, 0) for name in hierarchy.file_cache)


def _fields(path: Path) -> Mapping[str, int]:
    """The numbers of a file of the kernel with a name and a number on each line."""
    pairs = (line.split()[:2] for line in path.read_text().splitlines())
    return {name.rstrip(":"): int(number) for name, number in pairs}
