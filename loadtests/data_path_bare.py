"""The least that could move the same bytes: a bare HTTP server and two Kafka topics.

    client --HTTP--> server --asked--> answerer
                       ^                  |
                       +----answered------+

The server writes a record of each body, the answerer waits as long as an engine takes and writes a
record back, the server answers with as many bytes as a completion has. Bodies, answers and records
are as long as those that the system under load moved for a completion; nothing is computed. As many
requests are in flight as there are agents, so the records batch as well as they can.
`data_path.py` divides the system's CPU time by that of server, answerer and broker here,
`gateway.py` compares the time that they add with that of the system, at as many requests a second.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import psutil
from aiohttp import web
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from msgspec import Struct

ASKED, ANSWERED = "bare-asked", "bare-answered"
HOST = "127.0.0.1"
LINGER_MS = 5
"""Records of a few milliseconds share a request to the broker, as those of the system do."""
BODY_BYTES_MAX = 64 * 1024 * 1024
WARM_UP_S = 5.0
MEASURE_S = 15.0


class Shape(Struct, frozen=True, kw_only=True):
    """How many bytes a completion moves, and how fast.

    Attributes:
        kafka: Address of the broker.
        body_bytes: Of a request over HTTP.
        reply_bytes: Of its answer.
        log_bytes: On the log, half of them in each topic.
        engine_s: Time from the record that asks to the one that answers.
        clients: Requests at once.
        linger_ms: How long a record waits for others that share its request to the broker.
    """

    kafka: str
    body_bytes: int
    reply_bytes: int
    log_bytes: int
    engine_s: float
    clients: int
    linger_ms: int = LINGER_MS


class Server:
    """Answers each POST once its record came back."""

    def __init__(self, shape: Shape, producer: AIOKafkaProducer) -> None:
        self._shape = shape
        self._producer = producer
        self._waiting: dict[bytes, asyncio.Future[None]] = {}
        self._value = os.urandom(shape.log_bytes // 2)
        self._reply = b"x" * shape.reply_bytes

    async def answer(self, request: web.Request) -> web.Response:
        """Read the body, write its record, wait for the answer's."""
        await request.read()
        identity = os.urandom(16)
        future = asyncio.get_running_loop().create_future()
        self._waiting[identity] = future
        await self._producer.send(ASKED, self._value, key=identity, partition=0)
        await future
        return web.Response(body=self._reply)

    async def read_answers(self, consumer: AIOKafkaConsumer) -> None:
        """Wake the request of each record, until cancelled."""
        async for record in consumer:
            future = self._waiting.pop(record.key, None)
            if future is not None:
                future.set_result(None)


async def serve(shape: Shape) -> None:
    """Serve on a free port, which is printed, until the process ends."""
    async with _producer(shape) as producer, _consumer(shape, ANSWERED) as consumer:
        server = Server(shape, producer)
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_post("/", server.answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0).start()
        print(runner.addresses[0][1], flush=True)
        await server.read_answers(consumer)


async def answer_all(shape: Shape) -> None:
    """Write an answer for each record that asks, `engine_s` later, until the process ends."""
    value = os.urandom(shape.log_bytes // 2)
    async with _producer(shape) as producer, _consumer(shape, ASKED) as consumer:
        print("up", flush=True)

        async def answer(key: bytes) -> None:
            await asyncio.sleep(shape.engine_s)
            await producer.send(ANSWERED, value, key=key, partition=0)

        async with asyncio.TaskGroup() as tasks:
            async for record in consumer:
                tasks.create_task(answer(record.key))


async def bare_cpu_ms(shape: Shape, *, broker: psutil.Process | None) -> float:
    """CPU milliseconds a request of server, answerer and, if it is known, broker."""
    async with _running(shape) as (answerer, server, url):
        measured = [psutil.Process(answerer), psutil.Process(server)]
        measured += [broker] if broker is not None else []
        counts = [0]
        asking = asyncio.create_task(_ask_all(shape, url, counts))
        await asyncio.sleep(WARM_UP_S)
        before, answered = sum(map(_cpu_s, measured)), counts[0]
        await asyncio.sleep(MEASURE_S)
        used_s, answered = sum(map(_cpu_s, measured)) - before, counts[0] - answered
        asking.cancel()
        await asyncio.wait([asking])
    return 1000 * used_s / max(1, answered)


async def bare_added_ms(shape: Shape, *, per_second: float) -> list[float]:
    """What each request took beyond `engine_s`, sorted; one is due every 1 / `per_second`."""
    body, took_s = b"x" * shape.body_bytes, []

    async def ask(session: aiohttp.ClientSession, url: str, *, due_s: float) -> None:
        async with session.post(url, data=body) as response:
            await response.read()
        took_s.append((due_s, time.monotonic() - due_s))

    connector = aiohttp.TCPConnector(limit=0)
    async with (
        _running(shape) as (_, _, url),
        aiohttp.ClientSession(connector=connector) as session,
        asyncio.TaskGroup() as tasks,
    ):
        began_s = due_s = time.monotonic()
        while due_s < began_s + WARM_UP_S + MEASURE_S:
            tasks.create_task(ask(session, url, due_s=due_s))
            due_s += 1 / per_second
            await asyncio.sleep(due_s - time.monotonic())
    measured = [took for due_s, took in took_s if due_s >= began_s + WARM_UP_S]
    return sorted(1000 * (took - shape.engine_s) for took in measured)


@asynccontextmanager
async def _running(shape: Shape) -> AsyncIterator[tuple[int, int, str]]:
    """Start both processes over new topics; yields answerer, server and the server's URL."""
    admin = AIOKafkaAdminClient(bootstrap_servers=shape.kafka)
    await admin.start()
    await admin.create_topics([NewTopic(name, 1, -1, {}) for name in (ASKED, ANSWERED)])
    await admin.close()
    async with _process("answer_all", shape) as (answerer, _), _process("serve", shape) as started:
        server, port = started
        yield answerer, server, f"http://{HOST}:{port}/"


async def _ask_all(shape: Shape, url: str, counts: list[int]) -> None:
    body = b"x" * shape.body_bytes

    async def ask(session: aiohttp.ClientSession) -> None:
        while True:
            async with session.post(url, data=body) as response:
                await response.read()
            counts[0] += 1

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:
        for _ in range(shape.clients):
            tasks.create_task(ask(session))


@asynccontextmanager
async def _process(role: str, shape: Shape) -> AsyncIterator[tuple[int, str]]:
    """Run this file in a role; yields its process id and the line that it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__)),
        role,
        msgspec.json.encode(shape).decode(),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        yield process.pid, line.decode().strip()
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def _producer(shape: Shape) -> AsyncIterator[AIOKafkaProducer]:
    # Durable and without duplicates, as every writer of the system is.
    producer = AIOKafkaProducer(
        bootstrap_servers=shape.kafka,
        acks="all",
        enable_idempotence=True,
        linger_ms=shape.linger_ms,
        max_request_size=BODY_BYTES_MAX,
    )
    await producer.start()
    try:
        yield producer
    finally:
        await producer.stop()


@asynccontextmanager
async def _consumer(shape: Shape, topic: str) -> AsyncIterator[AIOKafkaConsumer]:
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=shape.kafka, auto_offset_reset="latest")
    await consumer.start()
    try:
        await consumer.seek_to_end()
        yield consumer
    finally:
        await consumer.stop()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    role, settings = sys.argv[1:]
    given = msgspec.json.decode(settings, type=Shape)
    asyncio.run({"serve": serve, "answer_all": answer_all}[role](given))
