"""Runs one program in namespaces of its own, or commands one after another in the same ones.

Started as `python -I -S jail.py CONFIGURATION_FD LIFELINE_FD REPORT_FD [COMMANDS_FD]`, so it has
the standard library alone. The configuration is JSON. All ends when the lifeline does: when the
process that started this one closes it or dies. The other side is `sandbox.py`, or `shell.py`: it
sends each command with the files for its input, output and errors, and reads how it ended.

    this process     watches time, processor time and memory; kills process 1
    +- process 1     of a new PID namespace; reaps; when it ends, the kernel kills all others in it
       +- program    a plain user without privileges in one more user namespace

The user namespace of the program is its own, because the kernel counts processes by user and user
namespace: RLIMIT_NPROC then bounds this program alone (Linux 5.14). Root changes to user 65534
first, since the kernel exempts root from that limit. Commands are watched by process 1, which no
signal from within its namespace can end.
"""

import base64
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

NOBODY = 65534
"""User and group inside; outside too if this process is root's."""

MESSAGE_BYTES_MAX = 131_072
"""Of a command with its arguments; the kernel takes no longer argument."""

_WATCH_S = 0.02
"""Between two looks at memory: a core fills about 100 MB in it."""

_SOCKET_QUEUES = 1.5
"""Times its buffer, that is what a socket holds at most: while the buffer is not full, a message of
up to half of it is taken. The filter of system calls lets nobody set the buffer."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_UTS, _NEW_IPC = 0x00020000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PIDS, _NEW_NET = 0x10000000, 0x20000000, 0x40000000
_READ_ONLY, _NO_SUID, _NO_DEVICES, _REMOUNT = 0x1, 0x2, 0x4, 0x20
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_MOUNT_SETATTR, _PIVOT_ROOT, _AT_FDCWD, _AT_RECURSIVE = 442, 155, -100, 0x8000
_PARENT_DEATH_SIGNAL, _DUMPABLE, _BOUNDING_DROP, _SECCOMP, _NO_NEW_PRIVILEGES = 1, 4, 24, 22, 38
_SECCOMP_FILTER, _DETACH, _CLOSED_ON_EXEC = 2, 2, socket.MSG_CMSG_CLOEXEC
_CAPABILITIES = 64
_DEVICES = ("null", "full", "random", "urandom")
"""Not zero: a shared mapping of it holds memory that no process has resident."""

_Fields = dict[str, Any]


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


class _MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user"))


def main() -> None:
    """Run the program and write the report."""
    numbers = [int(argument) for argument in sys.argv[1:]]
    for number in numbers:
        os.set_inheritable(number, False)
    configuration_fd, lifeline_fd, report_fd, *commands_fd = numbers
    with os.fdopen(configuration_fd) as file:
        configuration = json.load(file)
    commands = socket.socket(fileno=commands_fd[0]) if commands_fd else None
    try:
        report = _run(configuration, lifeline_fd, commands)
    except OSError as error:
        report = {"ended": "refused", "detail": str(error)}
    os.write(report_fd, json.dumps(report).encode())


def _run(configuration: _Fields, lifeline: int, commands: socket.socket | None) -> _Fields:
    processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    _enter_namespaces(processes)
    _build_root(configuration)
    go_reading, go_writing = os.pipe()
    status_reading, status_writing = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(go_writing)
        os.close(lifeline)
        _be_process_1(configuration, (go_reading, status_writing), processes, commands)
    os.close(status_writing)
    os.write(go_writing, b"!")
    bounds = None if commands else _Bounds(first, configuration["limits"], processes)
    if commands:
        commands.close()  # So that the other side reads its end if process 1 ends.
    try:
        return _watch(bounds, (lifeline, status_reading))
    finally:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)  # Returns once every process of the namespace is gone.


def _enter_namespaces(processes: int) -> None:
    wanted = _NEW_MOUNTS | _NEW_UTS | _NEW_IPC | _NEW_PIDS | _NEW_NET
    if os.geteuid() == 0:
        _check(_LIBC.unshare(wanted), "new namespaces, as root")
        return
    user, group = os.geteuid(), os.getegid()
    _check(_LIBC.unshare(wanted | _NEW_USER), "new namespaces, as a plain user")
    _map_user(processes, user=user, group=group)


def _map_user(processes: int, *, user: int, group: int) -> None:
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {user} 1"),
        ("gid_map", f"{NOBODY} {group} 1"),
    ):
        file = os.open(f"self/{name}", os.O_WRONLY, dir_fd=processes)
        os.write(file, text.encode())
        os.close(file)


def _build_root(configuration: _Fields) -> None:
    """Make a root of read-only folders and one small folder in memory that can be written."""
    limits = configuration["limits"]
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _NO_SUID | _NO_DEVICES)
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/new")
    _pivot_root("/tmp", "/tmp/old")
    _mount("tmpfs", "/new", "tmpfs", _NO_SUID | _NO_DEVICES, "mode=0755")
    for old in map(Path("/old").joinpath, ("bin", "sbin", "lib", "lib32", "lib64")):
        if old.is_symlink():
            os.symlink(os.readlink(old), Path("/new", old.name))
        elif old.is_dir():
            _show("/" + old.name)
    for folder in configuration["folders"]:
        _show(folder)
    _make_devices()
    os.mkdir("/new/program")
    for name, text in configuration["files"].items():
        Path("/new/program", name).write_text(text)
        Path("/new/program", name).chmod(0o755)
    size = f"size={limits['folder_bytes']},nr_inodes={limits['files']},mode=0777"
    os.mkdir("/new/tmp")
    _mount("tmpfs", "/new/tmp", "tmpfs", _NO_SUID | _NO_DEVICES, size)
    _pivot_root("/new", "/new")
    _check(_LIBC.umount2(b".", _DETACH), "leave the old root")
    os.chdir("/tmp")
    locked = _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES
    _mount(None, "/", None, locked)


def _show(folder: str) -> None:
    """Mount a folder of the machine at its own path, read-only with all that is mounted in it."""
    target = "/new" + folder
    os.makedirs(target, exist_ok=True)
    _mount("/old" + folder, target, None, _BIND | _RECURSIVE)
    wanted = _MountAttributes(set=_READ_ONLY | _NO_SUID | _NO_DEVICES)
    done = _LIBC.syscall(
        ctypes.c_long(_MOUNT_SETATTR),
        _AT_FDCWD,
        target.encode(),
        _AT_RECURSIVE,
        ctypes.byref(wanted),
        ctypes.c_size_t(ctypes.sizeof(wanted)),
    )
    _check(done, f"{folder} read-only")


def _make_devices() -> None:
    os.mkdir("/new/dev")
    for name in _DEVICES:
        Path("/new/dev", name).touch()
        _mount(f"/old/dev/{name}", f"/new/dev/{name}", None, _BIND)
    os.symlink("/tmp", "/new/dev/shm")


def _be_process_1(
    configuration: _Fields, pipes: tuple[int, int], processes: int, commands: socket.socket | None
) -> None:
    """Start the program, reap what ends, end with the program; or with the socket of commands."""
    go, status = pipes
    try:
        _control(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # A handler would let programs interrupt it.
        if not os.read(go, 1):
            os._exit(0)  # The watching process died before the signal was asked for.
        if commands is not None:
            return _serve_commands(configuration, commands, processes)
        program = os.fork()
        if program == 0:
            _become_program(configuration, processes)
        for number in (0, 1, 2):
            os.close(number)
        _control(_DUMPABLE, 0)  # After the start: the program may not look into this process.
        while (found := os.wait())[0] != program:
            pass
        os.write(status, str(found[1]).encode())
    except (OSError, ValueError) as error:
        os.write(status, f"refused: {error}".encode())
    finally:
        os._exit(0)


def _serve_commands(configuration: _Fields, commands: socket.socket, processes: int) -> None:
    """Run one command after another; what a command leaves running is killed."""
    _control(_DUMPABLE, 0)
    first = int(os.readlink("self", dir_fd=processes))  # This process, by the machine's numbers.
    while True:
        message, files, *_ = socket.recv_fds(commands, MESSAGE_BYTES_MAX, 3, _CLOSED_ON_EXEC)
        if not message:
            return
        if not files:
            continue  # A stop of the command before, which had ended by itself.
        bounds = _Bounds(first, configuration["limits"], processes)
        program = os.fork()
        if program == 0:
            _become_command({**configuration, "command": json.loads(message)}, files, processes)
        for number in files:
            os.close(number)
        report = _watch_command(program, bounds, commands)
        with contextlib.suppress(ProcessLookupError):  # None is left.
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.wait():
                pass
        commands.send(json.dumps(report).encode())


def _become_command(configuration: _Fields, files: list[int], processes: int) -> None:
    for number, file in enumerate(files):
        os.dup2(file, number)
    try:
        _become_program(configuration, processes)
    except OSError as error:
        os.write(2, f"the command did not start: {error}\n".encode())
    os._exit(127)


def _watch_command(program: int, bounds: "_Bounds", commands: socket.socket) -> _Fields:
    """Wait until the command ends, reaches a limit, or is to be stopped."""
    asked = commands.fileno()
    with os.fdopen(os.pidfd_open(program), "rb", buffering=0) as end:
        while True:
            readable, _, _ = select.select([asked, end.fileno()], [], [], _WATCH_S)
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == program:
                    return _ended(str(found[1]))
            if asked in readable:
                commands.recv(1)
                return {"ended": "stopped"}
            if reached := bounds.reached():
                return {"ended": reached}


def _become_program(configuration: _Fields, processes: int) -> None:
    limits, command = configuration["limits"], configuration["command"]
    # A second more until the kill: the signal of the first limit says why.
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))
    for number, bound in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(number, (bound, bound))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _control(_DUMPABLE, 1)  # Else its own uid_map belongs to root.
    _check(_LIBC.unshare(_NEW_USER), "a user namespace of the program")
    _map_user(processes, user=NOBODY, group=NOBODY)
    resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"], limits["processes"]))
    for capability in range(_CAPABILITIES):
        _LIBC.prctl(_BOUNDING_DROP, capability, 0, 0, 0)  # Fails for unused numbers.
    _control(_NO_NEW_PRIVILEGES, 1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    instructions = base64.b64decode(configuration["filter"])
    wanted = _FilterProgram(len(instructions) // 8, instructions)
    _control(_SECCOMP, _SECCOMP_FILTER, wanted)
    os.execve(command[0], command, configuration["environ"])


class _Bounds:
    """The limits of a program below process 1, from now on, and what it has used of them."""

    def __init__(self, first: int, limits: _Fields, processes: int) -> None:
        self._first, self._limits, self._processes = first, limits, processes
        self._cpu_before_s, _ = _used(first, processes)
        self._deadline_s = time.monotonic() + limits["time_s"]
        one, other = socket.socketpair()
        with one, other:
            buffer_bytes = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        # The most that one local socket keeps of what it sent and nobody read.
        self._socket_bytes = int(_SOCKET_QUEUES * buffer_bytes)

    def reached(self) -> str:
        """The limit that all its processes together have reached; "" if none."""
        if time.monotonic() > self._deadline_s:
            return "time"
        cpu_s, memory_bytes = _used(self._first, self._processes)
        if cpu_s - self._cpu_before_s > self._limits["cpu_s"]:
            return "cpu"
        memory_bytes += _sockets(self._processes) * self._socket_bytes
        return "memory" if memory_bytes > self._limits["memory_bytes"] else ""


def _watch(bounds: _Bounds | None, pipes: tuple[int, int]) -> _Fields:
    """Wait until process 1 ends, is to end, or its program reaches a limit."""
    lifeline, status = pipes
    timeout_s = None if bounds is None else _WATCH_S
    while True:
        readable, _, _ = select.select([lifeline, status], [], [], timeout_s)
        if status in readable:
            return _ended(os.read(status, 4096).decode(errors="replace"))
        if lifeline in readable:
            return {"ended": "stopped"}
        if bounds is not None and (reached := bounds.reached()):
            return {"ended": reached}


def _ended(said: str) -> _Fields:
    if not said.isdigit():
        return {"ended": "refused", "detail": said or "process 1 ended without a word"}
    status = os.waitstatus_to_exitcode(int(said))
    ended = "cpu" if status == -signal.SIGXCPU else "exit" if status >= 0 else "signal"
    return {"ended": ended, "status": status}


def _used(first: int, processes: int) -> tuple[float, int]:
    """Processor seconds and resident bytes of all processes below process 1, which reaps them."""
    ticks, pages, waiting = 0, 0, [str(first)]
    while waiting:
        one = waiting.pop()
        try:
            # The name, in parentheses, may hold anything: count from behind it.
            fields = _read(f"{one}/stat", processes).rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
            pages += int(fields[21]) if one != str(first) else 0
            for thread in _names(f"{one}/task", processes):
                waiting += _read(f"{one}/task/{thread}/children", processes).split()
        except OSError:
            continue  # It has ended since.
    return ticks / os.sysconf("SC_CLK_TCK"), pages * resource.getpagesize()


def _sockets(processes: int) -> int:
    """Local sockets of the network namespace, which is the program's, wherever they are held."""
    return _read("self/net/unix", processes).count("\n") - 1  # Without the line of titles.


def _names(path: str, processes: int) -> list[str]:
    folder = os.open(path, os.O_RDONLY, dir_fd=processes)
    try:
        return os.listdir(folder)
    finally:
        os.close(folder)


def _read(path: str, processes: int) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY, dir_fd=processes), encoding="latin-1") as file:
        return file.read()


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    names = [None if one is None else one.encode() for one in (source, target, kind)]
    done = _LIBC.mount(*names, ctypes.c_ulong(flags), data.encode() or None)
    _check(done, f"mount {source or ''} on {target.removeprefix('/new')}")


def _pivot_root(new: str, old: str) -> None:
    done = _LIBC.syscall(ctypes.c_long(_PIVOT_ROOT), new.encode(), old.encode())
    _check(done, f"change the root to {new}")
    os.chdir("/")


def _control(option: int, value: int, program: _FilterProgram | None = None) -> None:
    pointer = ctypes.byref(program) if program else ctypes.c_ulong(0)
    zero = ctypes.c_ulong(0)
    _check(_LIBC.prctl(option, ctypes.c_ulong(value), pointer, zero, zero), f"prctl {option}")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
