"""What the machine must offer, and how far an engine's start is."""

import socket

import pytest

from forgemq_launcher.core.phases import phase
from forgemq_launcher.upkeep.machine import MachineError, check_memory, engine_port, port

HOST = "127.0.0.1"


def test_too_little_memory_is_refused_with_what_is_free_and_what_to_do():
    wanted = 10**18  # Bytes; no machine has as many.
    with pytest.raises(MachineError) as caught:
        check_memory(bytes_min=wanted)
    message = str(caught.value)
    assert f"a run needs {wanted / 1e9:.1f} GB" in message
    assert "FORGEMQ_ENGINE_URL" in message
    assert "FORGEMQ_LAUNCHER_MEMORY_MIN_BYTES" in message


def test_enough_memory_is_no_error():
    check_memory(bytes_min=1)


@pytest.fixture
def taken():
    with socket.socket() as listening:
        listening.bind((HOST, 0))
        listening.listen()
        yield int(listening.getsockname()[1])


def test_a_wanted_port_that_is_taken_is_refused_by_number(taken):
    with pytest.raises(MachineError, match=f"port {taken} of {HOST} is taken"):
        port(HOST, wanted=taken)


def test_a_preferred_port_that_is_taken_is_replaced_by_a_free_one(taken):
    number = port(HOST, wanted=0, preferred=taken)
    assert number not in (0, taken)
    with socket.socket() as probe:
        probe.bind((HOST, number))


def test_a_free_port_is_given_as_asked():
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        free = int(probe.getsockname()[1])
    assert port(HOST, wanted=free) == free
    assert port(HOST, wanted=0, preferred=free) == free


def test_a_host_that_is_not_here_has_no_port():
    with pytest.raises(MachineError, match=r"no free port on 192\.0\.2\.1"):
        port("192.0.2.1", wanted=0)
    with pytest.raises(MachineError, match=r"no free port on 192\.0\.2\.1"):
        engine_port("192.0.2.1")


LOG = [
    "awq.py:53: UserWarning: Only CUDA, HIP and XPU support AWQ currently.",
    "[2026-11-21 04:45:12] server_args={'model_path': 'm'}",
    "  warnings.warn(",
    "[2026-11-21 04:46:45] Init parallel begin.",
    "[2026-11-21 04:46:51] Load weight begin. avail mem=7.61 GB",
    "[2026-11-21 04:46:51] Load weight end. elapsed=0.08 s",
    "[2026-11-21 04:46:55] Memory pool end. avail mem=7.40 GB",
]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (0, "importing libraries"),
        (1, "importing libraries"),
        (3, "starting its processes"),
        (4, "setting up"),
        (5, "loading weights"),
        (6, "allocating memory"),
        (7, "opening its port"),
    ],
)
def test_an_engines_start_is_shown_as_a_phase_and_not_as_its_warnings(lines, expected):
    assert phase(LOG[:lines]) == expected
