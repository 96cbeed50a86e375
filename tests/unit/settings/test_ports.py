"""Free ports of this machine."""

import socket
from pathlib import Path

import pytest

from forgemq_settings.ports import free_port, held_port

HOST = "127.0.0.1"
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_a_free_port_is_none_that_connections_and_other_listeners_are_given():
    first = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    ports = [free_port(HOST) for _ in range(200)]
    assert all(10_000 <= port < min(first, 22_000) for port in ports)


def test_ports_that_are_held_differ():
    holders = [held_port(HOST) for _ in range(200)]
    try:
        assert len({holder.getsockname()[1] for holder in holders}) == len(holders)
    finally:
        for holder in holders:
            holder.close()


def test_a_held_port_is_given_to_nobody_else_and_a_server_may_listen_there():
    with held_port(HOST) as holder:
        number = int(holder.getsockname()[1])
        with socket.socket() as other, pytest.raises(OSError, match="already in use"):
            other.bind((HOST, number))
        with socket.create_server((HOST, number)), socket.create_connection((HOST, number)):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, number))


def test_an_address_that_is_not_of_this_machine_has_no_port():
    with pytest.raises(OSError, match="assign requested address"):
        free_port("192.0.2.1")
