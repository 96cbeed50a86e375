"""What this machine offers: free memory, free ports, a GPU."""

import socket
import subprocess
from pathlib import Path

from forgemq_launcher.core.gpus import least_free_bytes
from forgemq_settings.memory import available_memory_bytes
from forgemq_settings.ports import free_port, held_port

BACKLOG = 4096
"""All agents of a run connect at once while a service restarts; Linux allows as many by default."""


class MachineError(Exception):
    """The machine cannot run this; the text says what is missing and what to do."""


def check_memory(*, bytes_min: int) -> None:
    """Raise MachineError if less memory than this is available."""
    available_bytes = available_memory_bytes()
    if available_bytes < bytes_min:
        raise MachineError(
            f"too little memory: {available_bytes / 1e9:.1f} GB are free, a run needs "
            f"{bytes_min / 1e9:.1f} GB; close something, name an engine on another machine with "
            "FORGEMQ_ENGINE_URL, or lower FORGEMQ_LAUNCHER_MEMORY_MIN_BYTES"
        )


def installed_gpus() -> int:
    """How many NVIDIA GPUs this machine has, by the device files of their driver."""
    return sum(path.name[len("nvidia") :].isdigit() for path in Path("/dev").glob("nvidia*"))


def free_gpu_bytes(*, cuda_visible_devices: str | None) -> int | None:
    """Free memory of the visible GPU that has the least; None if the driver's tool does not tell.

    Args:
        cuda_visible_devices: None if it is not set.
    """
    command = ("nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits")
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return least_free_bytes(told.stdout, cuda_visible_devices=cuda_visible_devices)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def port(host: str, *, wanted: int, preferred: int = 0) -> int:
    """A free TCP port: the wanted one, else the preferred one if it is free, else any.

    Raises:
        MachineError: the wanted port is taken, or none can be had.
    """
    if wanted:
        if not _is_free(host, wanted):
            raise MachineError(f"port {wanted} of {host} is taken: free it or choose another")
        return wanted
    if preferred and _is_free(host, preferred):
        return preferred
    try:
        return free_port(host)
    except OSError as error:
        raise MachineError(f"no free port on {host}: {error.strerror}") from error


def listening_socket(host: str, *, wanted: int, preferred: int = 0) -> socket.socket:
    """A socket that listens at a port as `port` chooses it; clients may connect at once.

    Raises:
        MachineError: as from `port`.
    """
    number = port(host, wanted=wanted, preferred=preferred)
    # The protocol is named because an event loop sets TCP_NODELAY only if it is.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, number))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise MachineError(f"port {number} of {host}: {error.strerror}") from error
    return listener


def engine_port(host: str) -> socket.socket:
    """A socket that holds a free port for an engine; close it once the engine is gone.

    Raises:
        MachineError: there is none.
    """
    try:
        return held_port(host)
    except OSError as error:
        raise MachineError(f"no free port on {host}: {error.strerror}") from error


def _is_free(host: str, number: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError:
            return False
    return True
