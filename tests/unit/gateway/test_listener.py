"""The socket that agents connect to."""

import os
import socket
from pathlib import Path

import pytest

from forgemq_gateway.http_server import bound_socket
from forgemq_gateway.settings import GatewaySettings
from forgemq_settings.environment import SettingsError
from tests.unit.gateway.world import ADMIN_KEY


def test_a_socket_that_was_handed_down_is_taken_in_place_of_host_and_port() -> None:
    with socket.socket(proto=socket.IPPROTO_TCP) as held:
        held.bind(("127.0.0.1", 0))
        handed = os.dup(held.fileno())
        settings = GatewaySettings(admin_key=ADMIN_KEY, port=1, listener_fd=handed)
        with bound_socket(settings) as listener:
            assert listener.getsockname() == held.getsockname()
            assert listener.proto == socket.IPPROTO_TCP


def test_a_number_that_is_no_inherited_tcp_socket_is_refused_by_name(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        settings = GatewaySettings(admin_key=ADMIN_KEY, listener_fd=file.fileno())
        with pytest.raises(SettingsError, match=r"FORGEMQ_GATEWAY_LISTENER_FD: \d+ is no"):
            bound_socket(settings)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        handed = os.dup(datagrams.fileno())
        settings = GatewaySettings(admin_key=ADMIN_KEY, listener_fd=handed)
        with pytest.raises(SettingsError, match="is no socket for TCP"):
            bound_socket(settings)
