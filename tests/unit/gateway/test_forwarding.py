"""What is sent on to the gateway that owns a group: to whom, how much at once, with which head."""

import asyncio
import io
from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts.ownership import OwnedRun, PartitionOwner, ReportedGateway
from forgemq_contracts.partitions import group_partition
from forgemq_gateway.access import Access
from forgemq_gateway.app import new_context
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.admission import Limits
from forgemq_gateway.core.errors import MovedError, RefusedError
from forgemq_gateway.core.forwards import Forwards
from forgemq_gateway.core.keys import AdminKeys
from forgemq_gateway.forwarding import OWNER_HEADER, Forwarder
from forgemq_gateway.passing import KeyedPath, Passing
from forgemq_gateway.whereabouts import Whereabouts
from forgemq_telemetry.telemetry import Telemetry
from tests.unit.gateway.scripted_lane import GROUP_PARTITIONS, wall_ms
from tests.unit.gateway.world import ADMIN_KEY, SETTINGS, configuration_of, partitions_of

KEYS = AdminKeys((ADMIN_KEY,), run="r")
KEY = KEYS.key_of("g.0.0")
CHANGE = 7
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
TURN = "/v1/chat/completions"


class Owner:
    """Another gateway, of which only the bytes count: it takes requests and gives one answer."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._asked = asyncio.Condition()
        self.answer = ANSWER

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append((await reader.readuntil(b"\r\n\r\n")).lower())
        async with self._asked:
            self._asked.notify_all()
        await self.may_answer.wait()
        writer.write(self.answer)
        await writer.drain()
        writer.close()

    async def has_been_asked(self, count: int) -> None:
        """Wait until so many requests have come."""
        async with self._asked:
            await self._asked.wait_for(lambda: len(self.heads) >= count)


class Scene:
    """A gateway that owns nothing, and the owner of all groups."""

    def __init__(self, passing: Passing, owner: Owner, context: GatewayContext) -> None:
        self.passing = passing
        self.owner = owner
        self.context = context
        self.lines = io.StringIO()
        self.served: list[bytes] = []

    async def ask(
        self,
        path: str = TURN,
        *,
        key: str = KEY,
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: bytes = b"",
        serve: Any = None,
    ) -> list[Any]:
        """Ask the gateway; returns what it sends."""
        sent: list[Any] = []
        messages: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": body}]
        raw = [(b"authorization", f"Bearer {key}".encode()), *headers]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": raw,
        }

        async def receive() -> MutableMapping[str, Any]:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop(0)

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        await self.passing.serve(scope, receive, send, serve or self.serve, KeyedPath(key, path))
        return sent

    async def serve(self, _: Any, receive: Any, send: Any, __: Any) -> None:
        """Serve here."""
        self.served.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"here"})


@asynccontextmanager
async def scene_of(
    model: Path, *, requests_max: int = 100, waiting_max: int = 0
) -> AsyncIterator[Scene]:
    owner, configuration = Owner(), configuration_of(model)
    limits = Limits(
        requests_max=requests_max,
        waiting_max=waiting_max,
        key_requests_max=100,
        key_rate_per_s_max=100.0,
    )
    log = MemoryLog(run="r", clock_ms=wall_ms)
    await log.create_topics(partitions_of(configuration))
    lines = io.StringIO()
    async with serving(owner) as url, asyncio.TaskGroup() as tasks, Forwarder() as forwarder:
        context = await new_context(
            log,
            configuration=configuration,
            settings=SETTINGS,
            telemetry=Telemetry(service="gateway", stream=lines),
            tasks=tasks,
            gateway="g",
            peer_url="http://127.0.0.1:1",
        )
        own_all(context, url)
        access = Access(keys=KEYS, registry=context.registry, gateways=context.gateways)
        passing = Passing(
            forwarder,
            whereabouts=Whereabouts(context=context),
            access=access,
            forwards=Forwards(limits),
            context=context,
        )
        scene = Scene(passing, owner, context)
        scene.lines = lines
        yield scene
    await log.close()


@asynccontextmanager
async def serving(owner: Owner) -> AsyncIterator[str]:
    """Address of another gateway."""
    async with await asyncio.start_server(owner.serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def report_of(gateway: str, url: str) -> ReportedGateway:
    return ReportedGateway(run="r", gateway=gateway, url=url, started_ms=1, reported_ms=1)


def own_all(context: GatewayContext, url: str) -> None:
    """Let the gateway at this address own all partitions."""
    there = report_of("o", url)
    everything = tuple(range(GROUP_PARTITIONS))
    owner = PartitionOwner(gateway="o", url=url, partitions=everything)
    context.gateways.hear(there, heard_s=0.0)
    context.gateways.take_owners(OwnedRun(run="r", owner=CHANGE, owned_ms=1, owners=(owner,)))


def head_of(scene: Scene) -> dict[str, str]:
    lines = scene.owner.heads[-1].decode().strip().split("\r\n")[1:]
    return dict(line.split(": ", 1) for line in lines)


async def test_a_gateway_says_by_which_change_it_sends_a_request_on_and_proves_it(
    model: Path,
) -> None:
    made_up = (OWNER_HEADER.encode(), b"9999")
    async with scene_of(model) as scene:
        sent = await scene.ask(headers=[made_up])
        said = head_of(scene)[OWNER_HEADER]
    number, proof = said.split(" ")
    assert (number, KEYS.seals(proof, number), KEYS.seals(proof, "8")) == (str(CHANGE), True, False)
    assert b"9999" not in scene.owner.heads[0]
    assert [message.get("body") for message in sent] == [None, b"ok"]


def test_gateways_believe_each_other_while_only_one_has_the_newest_admin_key() -> None:
    before, within = (AdminKeys(keys, run="r") for keys in (("old",), ("new", "old")))
    other_run = AdminKeys(("old",), run="s")
    assert any(before.seals(proof, "7") for proof in within.seals_of("7"))
    assert any(within.seals(proof, "7") for proof in before.seals_of("7"))
    assert not any(before.seals(proof, "7") for proof in other_run.seals_of("7"))


async def test_an_admin_path_without_the_admin_key_is_answered_here_alone(model: Path) -> None:
    async with scene_of(model) as scene:
        for path in ("/v1/groups/g", "/v1/groups/g/claim", "/v1/episodes/g.0.0/finish"):
            await scene.ask(path, key="g.0.0.made-up")
        assert (len(scene.served), scene.owner.heads) == (3, [])
        await scene.ask("/v1/groups/g", key=ADMIN_KEY)
    assert (len(scene.served), len(scene.owner.heads)) == (3, 1)


@pytest.mark.parametrize("body", [b'{"domain": "\xff", "idempotency_key": "k"}', b"[" * 100_000])
async def test_a_request_for_a_group_that_names_none_is_refused_here(model: Path, body) -> None:
    async with scene_of(model) as scene:
        await scene.ask("/v1/groups", key=ADMIN_KEY, body=body)
    assert (len(scene.served), scene.owner.heads) == (1, [])


async def test_keys_that_only_the_owner_can_check_take_no_place_from_those_of_agents(
    model: Path,
) -> None:
    async with asyncio.timeout(5), scene_of(model, requests_max=8) as scene:
        scene.owner.may_answer.clear()
        asking = [asyncio.ensure_future(scene.ask(key="g.0.0.made-up"))]
        await scene.owner.has_been_asked(1)
        with pytest.raises(RefusedError) as unproven:
            await scene.ask(key="g.0.0.made-up")
        asking += [asyncio.ensure_future(scene.ask()) for _ in range(8)]
        await scene.owner.has_been_asked(9)
        with pytest.raises(RefusedError) as proven:
            await scene.ask()
        asking.append(asyncio.ensure_future(scene.ask("/v1/groups/g", key=ADMIN_KEY)))
        scene.owner.may_answer.set()
        await asyncio.gather(*asking)
        await scene.ask()
        await scene.ask(key="g.0.0.made-up")
    assert [(e.value.status, e.value.retry_after_s) for e in (unproven, proven)] == [(429, 1)] * 2
    assert len(scene.owner.heads) == 12


async def test_each_owner_is_sent_as_many_requests_as_agents_may_have_there(model: Path) -> None:
    """One is served and one waits at each, through a gateway to which all clients are connected."""
    of_partition = {
        group_partition(f"g{n}", partitions=GROUP_PARTITIONS): f"g{n}" for n in range(99)
    }
    keys = [KEYS.key_of(f"{of_partition[number]}.0.0") for number in (0, 1)]
    other = Owner()
    async with (
        asyncio.timeout(5),
        scene_of(model, requests_max=1, waiting_max=1) as scene,
        serving(other) as url,
    ):
        scene.context.gateways.hear(report_of("p", url), heard_s=0.0)
        (first,) = scene.context.gateways.peers()[:1]
        scene.context.gateways.take_owners(
            OwnedRun(
                run="r",
                owner=CHANGE + 1,
                owned_ms=1,
                owners=(
                    PartitionOwner(gateway="o", url=first.url, partitions=(0,)),
                    PartitionOwner(gateway="p", url=url, partitions=(1, 2)),
                ),
            )
        )
        for owner in (scene.owner, other):
            owner.may_answer.clear()
        asking = [asyncio.ensure_future(scene.ask(key=key)) for key in keys * 2]
        for owner in (scene.owner, other):
            await owner.has_been_asked(2)
        for key in keys:
            with pytest.raises(RefusedError) as refused:
                await scene.ask(key=key)
            assert refused.value.status == 429
        for owner in (scene.owner, other):
            owner.may_answer.set()
        await asyncio.gather(*asking)
        for key in keys:
            await scene.ask(key=key)
    assert (len(scene.owner.heads), len(other.heads)) == (3, 3)


async def test_a_client_reads_no_address_of_an_owner_that_breaks_off(model: Path) -> None:
    async with scene_of(model) as scene:
        scene.owner.answer = b""
        with pytest.raises(RefusedError) as refused:
            await scene.ask()
    assert refused.value.status == 503
    assert "127.0.0.1" not in refused.value.message
    assert '"event":"forward_failed"' in scene.lines.getvalue().replace('": "', '":"')


async def test_headers_of_one_hop_and_those_named_so_end_here(model: Path) -> None:
    headers = [
        (b"connection", b"close, X-Own"),
        (b"x-own", b"1"),
        (b"x-other", b"2"),
        (b"transfer-encoding", b"chunked"),
        (b"content-length", b"3"),
    ]
    async with scene_of(model) as scene:
        await scene.ask(headers=headers, body=b"abcdefg")
        head = head_of(scene)
    assert head["transfer-encoding"] == "chunked"
    assert head["x-other"] == "2"
    left_out = ("x-own", "content-length", "accept-encoding", "user-agent", "content-type")
    assert not [name for name in left_out if name in head]


@pytest.mark.parametrize("path", ["@127.0.0.1:9/", ".example/", "*"])
async def test_a_path_cannot_name_another_host(model: Path, path: str) -> None:
    async with scene_of(model) as scene:
        with pytest.raises(RefusedError) as refused:
            await scene.ask(path)
    assert (refused.value.status, scene.owner.heads) == (400, [])


async def test_a_percent_encoded_path_arrives_as_the_client_wrote_it(model: Path) -> None:
    async with scene_of(model) as scene:
        await scene.ask("//v1/%63hat/../x%2Fy/")
    assert scene.owner.heads[0].startswith(b"post //v1/%63hat/../x%2fy/ http/1.1\r\n")


@pytest.mark.parametrize("has_opened", [False, True])
async def test_a_request_whose_group_leaves_and_comes_back_is_served_here(
    model: Path, has_opened: bool
) -> None:
    """Its client has one head, and the body is there again."""
    async with scene_of(model) as scene:
        scene.context.gateways.serving = set(range(GROUP_PARTITIONS))
        refusals: list[RefusedError] = []

        async def refuse(error: RefusedError) -> None:
            refusals.append(error)

        async def serve(scope: Any, receive: Any, send: Any, asked: Any) -> None:
            if scene.served:
                await scene.serve(scope, receive, send, asked)
                return
            moved = MovedError("g")
            moved.body = (await receive())["body"]
            scene.served.append(moved.body)
            if has_opened:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                moved.has_opened, moved.refuse = True, refuse
            raise moved

        sent = await scene.ask(body=b"asked", serve=serve)
    assert scene.served == [b"asked", b"asked"]
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert (sent[1]["body"], refusals) == (b"here", [])
