"""A gateway on a real socket over a log, with scripted lanes; tests are agents and scheduler."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from forgemq_bus.errors import ClosedError
from forgemq_bus.log import Log, Place
from forgemq_contracts import topics
from forgemq_contracts.episodes import Sampling
from forgemq_contracts.groups import AdmittedGroup, RequestedGroup, RetiredGroup, RetireReason
from forgemq_contracts.messages import Output
from forgemq_contracts.partitions import group_partition
from forgemq_contracts.run import Episodes, LogLayout, Model, Queue, RunConfiguration, Trainer
from forgemq_gateway.app import serve
from forgemq_gateway.settings import GatewaySettings
from forgemq_rendering import Rendering
from forgemq_shell.records import emit_of
from forgemq_telemetry.telemetry import Telemetry
from tests.unit.gateway.scripted_lane import GROUP_PARTITIONS, Script, ScriptedLane

ADMIN_KEY = "an-admin-key-of-some-length"
LANES = 2
# No limit on the rate of a key: a test may send as fast as its machine lets it.
SETTINGS = GatewaySettings(
    admin_key=ADMIN_KEY,
    keepalive_s=0.4,
    lane_hold_s=0.5,
    drain_s=1.0,
    key_requests_per_s_max=1e6,
)


def configuration_of(
    model: Path, *, run: str = "r", lease_s: float = 30.0, context_tokens_max: int = 4096
) -> RunConfiguration:
    return RunConfiguration(
        run=run,
        seed=1,
        model=Model(path=str(model), context_tokens_max=context_tokens_max, dtype="float32"),
        queues=(
            Queue(
                domain="shop",
                task_source="a:b",
                agent="a:c",
                group_size=2,
                groups_per_step=1,
                slots=4,
                groups_requested_max=3,
            ),
        ),
        trainer=Trainer(steps=10),
        episodes=Episodes(
            sampling=Sampling(temperature=1.0, max_tokens=200), lease_s=lease_s, attempts_max=2
        ),
        log=LogLayout(group_partitions=GROUP_PARTITIONS, lanes=LANES),
    )


def partitions_of(configuration: RunConfiguration) -> dict[str, int]:
    return {topic.name: topics.partition_count(topic, configuration) for topic in topics.OF_RUN}


def plain_http(*, timeout_s: float = 5.0) -> httpx.AsyncClient:
    """A client that trusts every server: to load certificates takes longer than most tests."""
    return httpx.AsyncClient(timeout=timeout_s, verify=False)


class ServedGateway(NamedTuple):
    """One gateway of a world."""

    url: str
    log: Log
    stop: asyncio.Event
    task: asyncio.Task[None]


class World:
    """A run with a gateway, or several; tests act as agents, scheduler and lanes."""

    def __init__(self, open_log: Callable[[], Log], configuration: RunConfiguration) -> None:
        self.open_log = open_log
        self.log = open_log()
        self.configuration = configuration
        self.rendering = Rendering.load(configuration.model.path)
        self.base_url = ""
        self.settings = SETTINGS
        self.clients: list[AsyncOpenAI] = []
        self.tasks: asyncio.TaskGroup | None = None
        self.telemetry = Telemetry(service="gateway")
        self.gateways: list[ServedGateway] = []

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start a gateway on a free port, from the log alone; agents then ask this one."""
        self.tasks = tasks
        listener = socket.socket(proto=socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # Connections wait until the gateway has opened its log.
        scheme = "https" if self.settings.tls_certificate_file else "http"
        self.base_url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        log, stop = self.open_log(), asyncio.Event()
        task = tasks.create_task(self._serve(listener, log, stop))
        self.gateways.append(ServedGateway(self.base_url, log, stop, task))
        async with plain_http() as client:
            while True:
                answer = await client.get(f"{self.base_url}/health", timeout=5)
                if answer.status_code == 200:
                    return
                await asyncio.sleep(0.02)

    async def start_another(self) -> None:
        """Start one more gateway, beside those that run or in place of one that was killed."""
        assert self.tasks is not None
        await self.start(self.tasks)

    def client(self, claim: Any, *, retries: int = 0) -> AsyncOpenAI:
        """OpenAI's client with the episode's key, closed with the world."""
        client = AsyncOpenAI(
            api_key=claim["key"],
            base_url=claim["base_url"],
            max_retries=retries,
            http_client=DefaultAsyncHttpxClient(verify=False),  # As `plain_http`.
        )
        self.clients.append(client)
        return client

    async def _serve(self, listener: socket.socket, log: Log, stop: asyncio.Event) -> None:
        try:
            await serve(
                configuration=self.configuration,
                settings=self.settings,
                log=log,
                telemetry=self.telemetry,
                stop=stop,
                listener=listener,
            )
        except* ClosedError:  # What `kill` does.
            pass

    async def kill(self) -> None:
        """End the newest gateway at once, as kill -9 does: its log takes no record after this."""
        gateway = self.gateways.pop()
        await gateway.log.close()
        await asyncio.wait([gateway.task])

    async def restart(self) -> None:
        """Kill the newest gateway and start one that knows what the log says, and no more."""
        await self.kill()
        await self.start_another()

    async def stop(self) -> None:
        """Stop all gateways."""
        for gateway in self.gateways:
            gateway.stop.set()
        await asyncio.gather(*(gateway.task for gateway in self.gateways))
        self.gateways.clear()

    async def admin(
        self, method: str, path: str, body: Any = None, *, key: str = ADMIN_KEY
    ) -> httpx.Response:
        async with plain_http(timeout_s=30) as client:
            return await client.request(
                method,
                self.base_url + path,
                json=body,
                headers={"Authorization": f"Bearer {key}"},
            )

    async def write(self, topic: topics.Topic, partition: int, record: msgspec.Struct) -> None:
        log = self.log
        output = Output(topic=topic.name, partition=partition, record=record)
        if topic.is_transactional:
            transactions = await log.transaction_writer("scheduler")
            await transactions.commit(outputs=[emit_of(output)], group="scheduler", positions={})
            await transactions.close()
        else:
            writer = await log.writer()
            await writer.write(emit_of(output))
            await writer.close()

    async def records(self, topic: topics.Topic) -> list[Any]:
        """All records of a topic, by partition and offset."""
        log = self.log
        places = [
            Place(topic.name, n) for n in range(partitions_of(self.configuration)[topic.name])
        ]
        ends = await log.end_positions(places)
        reader = await log.reader(dict.fromkeys(places, 0))
        found = []
        while any(reader.position(place) < ends[place] for place in places):
            found += await reader.read(timeout_s=0.5, records_max=1000)
        await reader.close()
        found.sort(key=lambda record: (record.partition, record.offset))
        return [topics.decode(topic, record.value) for record in found]

    async def eventually(self, topic: topics.Topic, count: int) -> list[Any]:
        """Wait until a topic has so many records, and return all."""
        for _ in range(200):
            records = await self.records(topic)
            if len(records) >= count:
                return records
            await asyncio.sleep(0.05)
        raise AssertionError(f"{topic.name}: {len(records)} records, waited for {count}")

    async def open_group(
        self, key: str = "k1", *, temperature: float | None = None, version: int = 0
    ) -> str:
        """Open a group: an agent requests it and the scheduler admits it."""
        body: dict[str, Any] = {"domain": "shop", "idempotency_key": key, "task": {"n": 1}}
        if temperature is not None:
            body["temperature"] = temperature
        answer = await self.admin("POST", "/v1/groups", body)
        assert answer.status_code == 200, answer.text
        group_id = str(answer.json()["group_id"])
        await self.admit(group_id, version=version)
        return group_id

    async def requested(self, group_id: str) -> RequestedGroup:
        """The request of a group; on a broker readers may see it a moment after its answer."""
        count = 1
        while True:
            records = await self.eventually(topics.REQUESTED_GROUPS, count)
            for record in records:
                if record.group_id == group_id:
                    assert isinstance(record, RequestedGroup)
                    return record
            count = len(records) + 1

    async def admit(self, group_id: str, *, version: int = 0) -> None:
        requested = await self.requested(group_id)
        await self.write(
            topics.ADMITTED_GROUPS,
            0,
            AdmittedGroup(
                group_id=group_id,
                domain=requested.domain,
                stage=requested.stage,
                purpose=requested.purpose,
                group_size=requested.group_size,
                task=requested.task,
                version_at_admission=version,
                queue_index=0,
                temperature=requested.temperature,
                source=requested.source,
            ),
        )

    async def retire(self, group_id: str, *, reason: RetireReason = "zero_variance") -> None:
        await self.write(
            topics.RETIRED_GROUPS,
            group_partition(group_id, partitions=GROUP_PARTITIONS),
            RetiredGroup(
                group_id=group_id,
                domain="shop",
                purpose="train",
                reason=reason,
                queue_index=0,
            ),
        )

    async def claim(self, group_id: str, *, wait_s: float = 5) -> Any:
        answer = await self.admin("POST", f"/v1/groups/{group_id}/claim", {"wait_s": wait_s})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def episode(self) -> Any:
        """Claim an episode of a new group."""
        return await self.claim(await self.open_group())


@asynccontextmanager
async def running(
    open_log: Callable[[], Log],
    configuration: RunConfiguration,
    script: Script,
    *,
    lanes: int = 1,
    memory_bytes_max: int = 1_000_000_000,
    drain_s: float = 1.0,
    telemetry: Telemetry | None = None,
    settings: GatewaySettings = SETTINGS,
) -> AsyncIterator[tuple[World, list[ScriptedLane]]]:
    """A world with a gateway and scripted lanes."""
    world = World(open_log, configuration)
    world.telemetry = telemetry or world.telemetry
    world.settings = msgspec.structs.replace(
        settings, memory_bytes_max=memory_bytes_max, drain_s=drain_s
    )
    await world.log.create_topics(partitions_of(configuration))
    async with asyncio.TaskGroup() as tasks:
        started = [
            ScriptedLane(world.log, world.rendering, script, lane=number) for number in range(lanes)
        ]
        running_lanes = [tasks.create_task(lane.run(tasks)) for lane in started]
        await world.start(tasks)
        try:
            yield world, started
        finally:
            for client in world.clients:
                await client.close()
            await world.stop()
            for lane in started:
                lane.stop()
            for task in running_lanes:
                task.cancel()
    await world.log.close()
