"""Small writes of one turn of the loop are one; order, large writes and ends are as they were."""

import asyncio

from forgemq_gateway.joined_writes import JoinedWrites


class Wire(asyncio.Transport):
    """What reaches the socket, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bytes | str] = []
        self.is_lost = False

    def is_closing(self) -> bool:
        return self.is_lost

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.calls.append(bytes(data))

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")


async def joined() -> tuple[JoinedWrites, list[bytes | str]]:
    wire = Wire()
    return JoinedWrites(wire, loop=asyncio.get_running_loop()), wire.calls


async def test_writes_of_one_turn_of_the_loop_are_one_and_those_of_the_next_another() -> None:
    transport, calls = await joined()
    transport.write(b"head ")
    transport.write(b"body")
    assert calls == []
    await asyncio.sleep(0)
    transport.write(b"next")
    await asyncio.sleep(0)
    assert calls == [b"head body", b"next"]


async def test_long_writes_are_written_at_once_behind_those_before() -> None:
    transport, calls = await joined()
    transport.write(b"head ")
    transport.write(b"x" * 65_536)
    assert calls == [b"head " + b"x" * 65_536]
    await asyncio.sleep(0)
    assert len(calls) == 1


async def test_a_close_sends_what_is_written_and_an_abort_does_not() -> None:
    transport, calls = await joined()
    transport.write(b"last")
    transport.close()
    transport.write(b"more")
    transport.abort()
    await asyncio.sleep(0)
    assert calls == [b"last", "close", "abort"]


async def test_what_is_written_before_a_connection_is_lost_is_not_written_after_it() -> None:
    wire = Wire()
    transport = JoinedWrites(wire, loop=asyncio.get_running_loop())
    transport.write(b"late")
    wire.is_lost = True
    await asyncio.sleep(0)
    assert wire.calls == []
