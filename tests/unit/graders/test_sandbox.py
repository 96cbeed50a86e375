"""Hostile programs in the sandbox, for real: what each one gets, and what is left of it."""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from forgemq_graders.sandbox import Execution, Sandbox, SandboxLimits

LIMITS = SandboxLimits(time_s=5, cpu_s=4, memory_bytes=2**27, processes=8, output_bytes=10_000)


# Of this process alone: tests beside it run programs too.
MAIN = f"main-{os.getpid()}.py"
PYTHON = (os.path.realpath(sys.executable), "-I", "-B", f"/program/{MAIN}")


async def run(program: str, *, stdin: bytes = b"", **limits) -> Execution:
    sandbox = Sandbox(msgspec.structs.replace(LIMITS, **limits))
    execution = await sandbox.run(PYTHON, files={MAIN: program}, stdin=stdin)
    assert programs_left() == []
    return execution


def programs_left() -> list[int]:
    """Processes of the machine that run a program of the sandbox."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if PYTHON[-1] in (process.info["cmdline"] or ())
    ]


async def test_a_program_reads_its_input_and_its_output_and_status_come_back():
    execution = await run("import sys\nprint(input()[::-1])\nsys.exit(3)", stdin=b"hello")
    assert (execution.ended, execution.status, execution.stdout) == ("exit", 3, b"olleh\n")


async def test_a_program_may_leave_much_input_unread():
    execution = await run("print('done')", stdin=b"x" * 2**22)
    assert (execution.ended, execution.stdout) == ("exit", b"done\n")


async def test_an_error_of_a_program_is_on_its_stderr():
    execution = await run("raise KeyError('x')")
    assert (execution.ended, execution.status) == ("exit", 1)
    assert b"KeyError: 'x'" in execution.stderr


async def test_a_crash_is_told_from_an_exit():
    execution = await run("import ctypes\nctypes.string_at(0)")
    assert (execution.ended, execution.status) == ("signal", -11)


FORK_BOMB = """
import os, sys
most = 0
for _ in range(100_000):
    try:
        if os.fork() == 0:
            while True:
                try:
                    os.fork()
                except OSError:
                    pass
        most += 1
    except OSError:
        break
print(most)
sys.stdout.flush()
while True:
    pass
"""


@pytest.mark.slow
async def test_a_fork_bomb_has_no_more_processes_than_the_limit_and_all_are_killed():
    execution = await run(FORK_BOMB, cpu_s=2)
    assert execution.ended in ("cpu", "time")
    assert int(execution.stdout) <= LIMITS.processes - 1


async def test_a_process_that_leaves_its_session_does_not_outlive_the_program():
    program = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
print("over")
"""
    execution = await run(program, time_s=50)
    assert (execution.ended, execution.stdout) == ("exit", b"over\n")


async def test_an_event_loop_and_its_processes_and_a_pool_of_processes_work():
    program = """
import asyncio, multiprocessing, subprocess, sys
def square(number):
    return number * number
async def main():
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "print(input())", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    print((await child.communicate(b"loop"))[0])
    print(await asyncio.to_thread(square, 3))
asyncio.run(main())
with multiprocessing.Pool(2) as pool:
    print(pool.map(square, range(4)))
here, there = multiprocessing.Pipe()
multiprocessing.Process(target=there.send, args=("pipe",)).start()
print(here.recv(), multiprocessing.Value("i", 7).value)
print(subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).stdout)
"""
    execution = await run(program, processes=16)
    assert execution.stdout.decode().splitlines() == [
        "b'loop\\n'",
        "9",
        "[0, 1, 4, 9]",
        "pipe 7",
        "b'1\\n'",
    ], execution.stderr


@pytest.mark.slow
async def test_output_without_end_is_cut_at_the_limit():
    for stream in ("stdout", "stderr"):
        execution = await run(f"import sys\nwhile True:\n    sys.{stream}.write('x' * 4096)")
        assert execution.ended == "output"
        assert getattr(execution, stream) == b"x" * LIMITS.output_bytes


@pytest.mark.slow
async def test_a_program_that_sleeps_is_killed_at_its_time():
    began_s = time.monotonic()
    assert (await run("import time\ntime.sleep(1000)", time_s=1)).ended == "time"
    assert time.monotonic() - began_s < 30


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_processor_time_counts_for_all_processes_together():
    program = """
import os, time
os.fork(), os.fork()
reported_s = 0.0
while True:
    if time.process_time() > reported_s + 0.1:
        reported_s = time.process_time()
        os.write(1, f"{os.getpid()} {reported_s:.2f}\\n".encode())
"""
    execution = await run(program, cpu_s=1, time_s=120)
    assert execution.ended == "cpu"
    reports = (line.split() for line in execution.stdout.decode().splitlines())
    used_s = {process: float(seconds) for process, seconds in reports}
    assert len(used_s) == 4
    assert sum(used_s.values()) < 2


async def test_a_huge_file_many_files_and_much_in_all_end_at_their_limits():
    program = """
import os
def fill(write):
    total = 0
    try:
        while True:
            total += write(total)
    except OSError as error:
        return total, error.strerror
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
big = open("big", "wb", buffering=0)
print(*fill(lambda _: big.write(b"x" * 65536)))
def named(total):
    open(f"n{total}", "w").close()
    return 1
print(*fill(named))
def another(total):
    with open(f"n{total // 65536}", "wb") as file:
        return file.write(b"x" * 65536)
print(*fill(another))
"""
    execution = await run(program, file_bytes=2**20, folder_bytes=2**22, files=100)
    one, many, much = execution.stdout.decode().splitlines()
    assert one == f"{2**20} File too large"
    assert many == "98 No space left on device"
    assert much == f"{2**22 - 2**20} No space left on device"


async def test_no_file_of_the_user_and_no_process_of_the_machine_is_in_reach(tmp_path: Path):
    key = tmp_path / "admin.key"
    key.write_text("secret")
    program = f"""
import os
for path in ({str(key)!r}, {__file__!r}, "/etc/passwd", "/etc/shadow", "/proc/1/environ",
             "/proc/self/environ", "/dev/mem", "/dev/vda", "/sys", "/home", "/run", "/var"):
    if os.path.exists(path):
        print(path)
print(sorted(os.environ))
print(os.getuid(), os.getgid(), os.getgroups() in ([], [65534]), os.getpid())
"""
    execution = await run(program)
    assert execution.stdout.decode().splitlines() == [
        "['HOME', 'LANG', 'PATH']",
        "65534 65534 True 2",
    ], execution.stderr


async def test_nothing_but_its_own_folder_can_be_written_and_that_is_gone_afterwards():
    program = """
import os
for path in ("/x", "/usr/x", "/program/x", "/program/main.py", "/dev/x", "/tmp/x"):
    try:
        open(path, "a").write("x")
        print(path)
    except OSError:
        pass
"""
    assert (await run(program)).stdout == b"/tmp/x\n"
    assert (await run("import os\nprint(os.listdir('/tmp'))")).stdout == b"[]\n"


async def test_a_program_that_kills_whatever_it_can_ends_itself_alone():
    program = """
import os, signal
for number in (os.getppid(), 1, *range(3, 70000)):
    try:
        os.kill(number, signal.SIGKILL)
    except OSError:
        pass
try:
    os.kill(-1, signal.SIGKILL)
except OSError:
    print("nobody else is there", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    beside = await asyncio.create_subprocess_exec("sleep", "60")
    execution = await run(program)
    assert beside.returncode is None
    beside.kill()
    await beside.wait()
    assert (execution.ended, execution.status) == ("signal", -9)
    assert execution.stdout == b"nobody else is there\n"


async def test_there_is_no_network_not_even_that_of_this_machine():
    heard: list[object] = []
    server = await asyncio.start_server(lambda *pair: heard.append(pair), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    program = f"""
import socket
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_VSOCK):
    try:
        socket.socket(family, socket.SOCK_STREAM)
        print(family)
    except OSError:
        pass
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=1)
except OSError:
    print("none")
"""
    execution = await run(program)
    server.close()
    await server.wait_closed()
    assert (execution.stdout, heard) == (b"none\n", [])


async def test_sockets_of_the_machine_that_are_files_or_names_are_out_of_reach():
    program = """
import socket
for family, kind in ((socket.AF_UNIX, None), (socket.AF_INET, None),
                     (None, socket.SOCK_DGRAM), (None, socket.SOCK_SEQPACKET)):
    try:
        socket.socket(family) if family else socket.socketpair(socket.AF_UNIX, kind)
        print("made")
    except OSError as error:
        print(error.strerror)
one, other = socket.socketpair()
for address in ("\\0forgemq-sandbox-test", "/tmp/no-such-socket"):
    try:
        one.connect(address)
        print("connected")
    except OSError as error:
        print(error.strerror)
"""
    execution = await run(program)
    assert execution.stdout.decode().splitlines() == [
        *["Address family not supported by protocol"] * 2,
        *["Protocol not supported"] * 2,
        *["Operation not permitted"] * 2,
    ], execution.stderr


async def test_a_cancelled_run_leaves_no_process():
    sandbox = Sandbox(LIMITS)
    await sandbox.check()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(
            sandbox.run(PYTHON, files={MAIN: "import time\ntime.sleep(1000)"})
        )
        await until(lambda: bool(programs_left()))
        running.cancel()
    assert programs_left() == []


async def test_a_program_leads_a_group_in_the_session_of_who_asked_without_its_terminal():
    """In a session of its own it would wait for seconds beside engines on a CPU."""
    looked = await run("import os; print(os.path.exists('/dev/tty'))")
    assert looked.stdout == b"False\n"
    sandbox = Sandbox(LIMITS)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(
            sandbox.run(PYTHON, files={MAIN: "import time\ntime.sleep(1000)"})
        )
        await until(lambda: bool(programs_left()))
        program = programs_left()[0]
        assert os.getsid(program) == os.getsid(0)
        assert os.getpgid(program) != os.getpgid(0)
        running.cancel()
    assert programs_left() == []


@pytest.mark.slow
async def test_a_program_ends_with_the_process_that_asked_for_it():
    code = """
import asyncio
from forgemq_graders.sandbox import SandboxLimits, Sandbox
async def main():
    sandbox = Sandbox(SandboxLimits(time_s=60))
    await sandbox.check()
    print("checked", flush=True)
    await sandbox.run(PYTHON, files={MAIN: "import time; time.sleep(1000)"})
asyncio.run(main())
"""
    code = f"PYTHON, MAIN = {PYTHON!r}, {MAIN!r}\n{code}"
    asking = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=-1)
    assert asking.stdout is not None
    assert await asking.stdout.readline() == b"checked\n"
    await until(lambda: bool(programs_left()))
    asking.kill()
    await asking.communicate()
    await until(lambda: not programs_left())


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_programs_run_beside_each_other_and_their_limits_are_their_own():
    sandbox = Sandbox(msgspec.structs.replace(LIMITS, time_s=120), at_once=4)
    program = "import os\nfor _ in range(7):\n    os.fork() or os._exit(0)\nprint('seven')"
    executions = await asyncio.gather(*(sandbox.run_python(program) for _ in range(4)))
    assert [one.stdout for one in executions] == [b"seven\n"] * 4
