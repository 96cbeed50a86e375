"""Runs a command of a service, in a process of its own: services never import one another."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence

from rich.console import Console

from forgemq_launcher.display.lines import say


async def print_service(
    service: str,
    arguments: Sequence[str],
    *,
    environ: Mapping[str, str],
    console: Console,
    ends_itself: bool = False,
) -> int:
    """Run a service with these arguments and print what it prints; returns its exit status.

    Args:
        service: Its name, as in `python -m forgemq_<service>`.
        arguments: Its command line.
        environ: Its whole environment.
        console: Where to print.
        ends_itself: SIGINT and SIGTERM are passed on to the service, which ends what it has begun;
            else it is killed.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"forgemq_{service}", *arguments),
        env=dict(environ),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        # Else a terminal sends it Ctrl-C too, and it would count two.
        start_new_session=ends_itself,
    )
    assert process.stdout is not None
    if ends_itself:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, process.send_signal, number)
    try:
        async for line in _lines(process.stdout):
            say(console, line.decode(errors="replace").rstrip("\n"))
        return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _lines(printed: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Every line, in pieces if it is longer than the stream holds: it may quote a user's file."""
    while True:
        try:
            yield await printed.readuntil()
        except asyncio.LimitOverrunError as error:
            yield await printed.readexactly(error.consumed)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                yield error.partial
            return
