"""Machines and programs that the sandbox refuses by name, and the right of a plain user."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from forgemq_graders import jail
from forgemq_graders.probe import ENVIRON, PROBE, faults
from forgemq_graders.sandbox import IsolationRefusedError, Sandbox, SandboxLimits
from tests.unit.graders.test_sandbox import LIMITS, run

JAIL = Path(jail.__file__)


async def test_a_program_cannot_be_run_outside_of_what_isolates_it():
    """In the sandbox itself no second one can be made: it is refused, and nothing runs."""
    source = JAIL.read_text()  # noqa: ASYNC240 - a small file
    program = f"""
import os, subprocess, sys
configuration = os.open("/tmp/configuration", os.O_RDWR | os.O_CREAT)
os.write(configuration, b"{{}}")
os.lseek(configuration, 0, 0)
lifeline, report = os.pipe(), os.pipe()
os.mkdir("/tmp/proc")
fds = (configuration, lifeline[0], report[1])
source = {source!r}.replace('"/proc"', '"/tmp/proc"')
subprocess.run([sys.executable, "-I", "-S", "-c", source, *map(str, fds)], pass_fds=fds)
print(os.read(report[0], 1000).decode())
"""
    said = json.loads((await run(program)).stdout)
    assert said["ended"] == "refused"
    assert "new namespaces, as a plain user: Operation not permitted" in said["detail"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take the right away")
def test_a_machine_that_allows_no_user_namespaces_is_refused_by_name():
    code = """
import asyncio, pathlib
pathlib.Path("/proc/sys/user/max_user_namespaces").write_text("0")
from forgemq_graders.sandbox import IsolationRefusedError, Sandbox
try:
    asyncio.run(Sandbox().run_python("print('ran')"))
except IsolationRefusedError as error:
    print(error)
"""
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", code]
    said = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert said.startswith("the sandbox cannot isolate a program: "), said
    assert "ran" not in said


@pytest.mark.skipif(os.geteuid() != 0, reason="run by a plain user, all tests here are this one")
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="no Python for a plain user")
def test_it_works_for_a_plain_user_as_it_does_for_root():
    code = f"""
import base64, json, os, sys
sys.path.insert(0, {str(JAIL.parent)!r})
import system_calls
configuration = os.memfd_create("c")
os.write(configuration, json.dumps({{
    "command": ["/usr/bin/python3", "-I", "-B", "/program/main.py"],
    "environ": {ENVIRON!r}, "folders": ["/usr"], "files": {{"main.py": {PROBE!r}}},
    "limits": {json.dumps(msgspec.to_builtins(SandboxLimits(processes=4)))},
    "filter": base64.b64encode(system_calls.call_filter()).decode(),
}}).encode())
os.lseek(configuration, 0, 0)
sys.argv[1:] = map(str, (configuration, os.pipe()[0], 2))
import jail
jail.main()
"""
    done = subprocess.run(
        ["/usr/bin/python3", "-c", code],
        capture_output=True,
        check=True,
        user=65534,
        group=65534,
        extra_groups=(),
    )
    assert json.loads(done.stderr) == {"ended": "exit", "status": 0}
    root = {"bin", "sbin", "lib", "lib32", "lib64", "usr", "dev", "program", "tmp"}
    assert faults(done.stdout, processes_max=4, root=root) == ""


AS_A_PLAIN_USER = """
import base64, json, os, socket, sys
sys.path.insert(0, FOLDER)
import system_calls
configuration = os.memfd_create("c")
os.write(configuration, json.dumps({
    "environ": ENVIRON, "folders": ["/usr"], "files": {}, "limits": LIMITS,
    "filter": base64.b64encode(system_calls.call_filter()).decode(),
}).encode())
os.lseek(configuration, 0, 0)
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
lifeline, report = os.pipe(), os.pipe()
if os.fork() == 0:
    ours.close()
    os.close(lifeline[1])
    sys.argv[1:] = map(str, (configuration, lifeline[0], report[1], theirs.fileno()))
    import jail
    jail.main()
    os._exit(0)
theirs.close()
for command in COMMANDS:
    reading, writing = os.pipe()
    line = json.dumps(["/bin/sh", "-c", command]).encode()
    socket.send_fds(ours, [line], [os.open("/dev/null", os.O_RDONLY), writing, writing])
    os.close(writing)
    with os.fdopen(reading) as output:
        print(json.dumps([json.loads(ours.recv(4096) or "{}"), output.read()]))
"""
SHORTEN = "python3 -c 'import resource; resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))'"


@pytest.mark.skipif(os.geteuid() != 0, reason="run by a plain user, test_shell is this one")
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="no Python for a plain user")
def test_a_plain_users_command_cannot_end_what_watches_it():
    """Process 1 is the same user's there, so that only what it is and the filter protect it."""
    commands = ["kill -INT 1; kill -9 1; kill -9 -1", SHORTEN, "echo alive"]
    values = {
        "FOLDER": str(JAIL.parent),
        "ENVIRON": ENVIRON,
        "LIMITS": msgspec.to_builtins(LIMITS),
        "COMMANDS": commands,
    }
    code = "".join(f"{name} = {value!r}\n" for name, value in values.items()) + AS_A_PLAIN_USER
    done = subprocess.run(
        ["/usr/bin/python3", "-c", code],
        capture_output=True,
        check=True,
        user=65534,
        group=65534,
        extra_groups=(),
        cwd="/",
        timeout=60,
    )
    killed, shortened, alive = map(json.loads, done.stdout.splitlines())
    assert killed[0] == {"ended": "exit", "status": 1}
    assert "PermissionError" in shortened[1]
    assert alive == [{"ended": "exit", "status": 0}, "alive\n"]


def test_each_missing_part_of_the_isolation_is_named():
    whole = {
        "process": 2,
        "user": 65534,
        "processes": 4,
        "environ": ["HOME", "LANG", "LC_CTYPE", "PATH"],
        "root": ["tmp"],
        "has_network": False,
        "has_write": False,
        "has_memory": False,
        "has_namespaces": False,
    }
    assert faults(json.dumps(whole).encode(), processes_max=4, root={"tmp"}) == ""
    wrong = {
        "process": 700,
        "user": 0,
        "processes": 5,
        "environ": ["KEY"],
        "root": ["home"],
        **dict.fromkeys(("has_network", "has_write", "has_memory", "has_namespaces"), True),
    }
    said = {
        name: faults(json.dumps({**whole, name: value}).encode(), processes_max=4, root={"tmp"})
        for name, value in wrong.items()
    }
    assert said == {
        "process": "processes of the machine are in reach;",
        "user": "the user is privileged;",
        "processes": "the number of processes has no limit;",
        "environ": "the environment is inherited;",
        "root": "files of the machine are in reach;",
        "has_network": "there is a network;",
        "has_write": "folders of the machine can be written;",
        "has_memory": "memory has no limit;",
        "has_namespaces": "system calls are not filtered;",
    }
    assert faults(b"", processes_max=4, root=()) == "it did not run to its end;"


def test_limits_and_folders_out_of_bounds_are_refused_by_name():
    with pytest.raises(msgspec.ValidationError, match=r"`int` >= 1 - at `\$.processes`"):
        Sandbox(SandboxLimits(processes=0))
    with pytest.raises(ValueError, match="folders must be folders of this machine, got /no/such"):
        Sandbox(folders=("/no/such",))


async def test_a_command_that_is_not_there_is_refused():
    with pytest.raises(IsolationRefusedError, match="No such file or directory"):
        await Sandbox(LIMITS).run(("/no/such/program",))
