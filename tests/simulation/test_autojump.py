"""The loop that simulations and many unit tests run on: what it skips, and what it does not."""

import asyncio
import sys
import time


async def test_what_nobody_works_in_is_skipped_and_counts_as_passed() -> None:
    loop = asyncio.get_running_loop()
    began_s, machine_s = loop.time(), time.monotonic()
    await asyncio.sleep(3600)
    assert 3600 <= loop.time() - began_s < 3601
    assert time.monotonic() - machine_s < 10


async def test_timers_fire_in_the_order_of_their_time() -> None:
    fired: list[float] = []

    async def fire(after_s: float) -> None:
        await asyncio.sleep(after_s)
        fired.append(after_s)

    await asyncio.gather(*(fire(after_s) for after_s in (30.0, 0.002, 700.0, 1.0)))
    assert fired == [0.002, 1.0, 30.0, 700.0]


async def test_no_time_is_skipped_while_a_thread_works() -> None:
    async with asyncio.timeout(50):
        await asyncio.to_thread(time.sleep, 0.1)


async def test_no_time_is_skipped_while_a_child_works() -> None:
    async with asyncio.timeout(50):
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", "pass")
        assert await child.wait() == 0


async def test_a_deadline_ends_what_never_comes() -> None:
    waited_s = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(20):
            await asyncio.Event().wait()
    except TimeoutError:
        waited_s = asyncio.get_running_loop().time() - waited_s
    assert 20 <= waited_s < 21


async def test_what_comes_through_a_local_socket_is_not_jumped_over() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, asyncio.timeout(5):
        for _ in range(50):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"said\n")
            assert await reader.read() == b"said\n"
            writer.close()
            await writer.wait_closed()
