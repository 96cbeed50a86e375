"""An engine that a person starts: in the foreground, until Ctrl-C."""

import argparse
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from forgemq_sglang_cpu.options import EngineOptions
from forgemq_sglang_cpu.pair import Role
from forgemq_sglang_cpu.server import EngineServer, EngineServerError

WATCH_EVERY_S = 1.0
"""How soon an engine that died is noticed."""


def run_in_foreground(arguments: Sequence[str]) -> int:
    """Start an engine, print its address once it answers, stop it at a signal.

    Returns:
        The exit status: 0 stopped by a signal, 1 it could not start, or died.
    """
    options = _parser().parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    has_gpu = options.gpu is not None
    server = EngineServer(
        options.model_path,
        options.folder,
        port=options.port,
        host=options.host,
        options=EngineOptions(
            has_gpu=has_gpu,
            gpu_first=options.gpu or 0,
            role=options.role,
            bootstrap_port=options.bootstrap_port,
        ),
    )
    try:
        _print(f"SGLang starts at {server.url} (0.5-3 minutes), log: {server.log_path}")
        server.start()
        waited_s = _wait_healthy(server, stop)
        if waited_s is not None:
            _print(f"the engine answers at {server.url} after {waited_s:.0f} s")
        while not stop.wait(WATCH_EVERY_S):
            if not server.is_running():
                _print("the engine died; the end of its log:", *server.log_tail())
                return 1
    except EngineServerError as error:
        _print(str(error))
        return 1
    finally:
        server.stop()
    return 0


def _wait_healthy(server: EngineServer, stop: threading.Event) -> float | None:
    """Seconds until the engine answered; None if a signal came first."""

    def check_signal(waited_s: float, line: str) -> None:
        del waited_s, line
        if stop.is_set():
            raise _StoppedError

    try:
        return server.wait_healthy(progress=check_signal)
    except _StoppedError:
        return None


class _StoppedError(Exception):
    """A signal came while the engine was starting."""


def _print(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)  # noqa: T201 - a person started it at a terminal


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m forgemq_sglang_cpu",
        description="One SGLang server for a run whose services are started by hand.",
    )
    parser.add_argument("--model-path", required=True, help="folder in Hugging Face format")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--gpu", type=int, metavar="N", help="serve on this GPU; default: the CPU")
    parser.add_argument(
        "--role",
        choices=get_args(Role),
        default="unified",
        help="prefill or decode: half of a pair; default: reads and samples",
    )
    parser.add_argument(
        "--bootstrap-port",
        type=int,
        default=8998,
        metavar="PORT",
        help="of a prefill engine: where decode asks for it; default: 8998",
    )
    parser.add_argument("--folder", type=Path, required=True, help="for engine.log")
    return parser
