"""The socket that agents connect to."""

import asyncio
import socket

from forgemq_gateway.http_server import bound_socket
from forgemq_gateway.settings import GatewaySettings
from tests.unit.gateway.world import ADMIN_KEY


async def test_an_answer_is_sent_without_waiting_for_the_clients_acknowledgement() -> None:
    listener = bound_socket(GatewaySettings(admin_key=ADMIN_KEY, port=0))
    options: asyncio.Queue[int] = asyncio.Queue()

    async def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        options.put_nowait(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(accepted, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await options.get() == 1
        writer.close()
        await writer.wait_closed()
