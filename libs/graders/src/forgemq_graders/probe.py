"""A program that tries what none in the sandbox may do, and the judgement of what it found."""

from collections.abc import Collection
from typing import Any

import msgspec

PROBE = """
import ctypes, json, os, signal, socket, time

def fails(act, *arguments):
    try:
        act(*arguments)
    except (OSError, MemoryError):
        return True
    return False

children = []
try:
    while len(children) < 100:
        child = os.fork()
        if child == 0:
            time.sleep(60)
        children.append(child)
except OSError:
    pass
for child in children:
    os.kill(child, signal.SIGKILL)
print(json.dumps({
    "process": os.getpid(),
    "user": os.getuid(),
    "processes": 1 + len(children),
    "environ": sorted(os.environ),
    "root": sorted(os.listdir("/")),
    "has_network": not fails(socket.socket, socket.AF_INET, socket.SOCK_STREAM),
    "has_write": not all(fails(open, path, "w") for path in ("/x", "/usr/x", "/program/x")),
    "has_memory": not fails(bytearray, 2**40),
    "has_namespaces": ctypes.CDLL(None).unshare(0x10000000) == 0,
}))
"""
"""Prints what it found as JSON."""

ENVIRON = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
"""All that a program sees; Python adds LC_CTYPE by itself."""


def faults(stdout: bytes, *, processes_max: int, root: Collection[str]) -> str:
    """What of the isolation is missing, in words; "" if nothing is.

    Args:
        stdout: Of the probe.
        processes_max: The limit under which it ran.
        root: Names that "/" may have.
    """
    try:
        found: dict[str, Any] = msgspec.json.decode(stdout, type=dict[str, Any])
    except msgspec.DecodeError:
        return "it did not run to its end;"
    tests = {
        "processes of the machine are in reach": found["process"] > 2,
        "the user is privileged": found["user"] != 65534,
        "the number of processes has no limit": found["processes"] > processes_max,
        "the environment is inherited": bool(set(found["environ"]) - {*ENVIRON, "LC_CTYPE"}),
        "files of the machine are in reach": bool(set(found["root"]) - set(root)),
        "there is a network": found["has_network"],
        "folders of the machine can be written": found["has_write"],
        "memory has no limit": found["has_memory"],
        "system calls are not filtered": found["has_namespaces"],
    }
    return "".join(f"{name};" for name, is_so in tests.items() if is_so)
