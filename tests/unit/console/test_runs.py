"""The runs of a broker on the console: listed, opened, and two of them compared."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any, cast

import httpx
import jsonschema
import msgspec
import pytest
from fastapi import FastAPI

from forgemq_bus.errors import AccessError, LogUnavailableError
from forgemq_bus.log import Log
from forgemq_bus.memory import MemoryLog
from forgemq_console.core import GroupView
from forgemq_console.http import web
from forgemq_console.other_runs import OPEN_MAX, Broker, OtherRuns
from forgemq_console.runs_http import add_runs
from forgemq_contracts.fields import NamedValue
from forgemq_contracts.messages import Output
from forgemq_contracts.run import EndedRun, StartedRun
from forgemq_contracts.topics import ENDED_RUNS, SHARED, STARTED_RUNS
from forgemq_launcher.records.run_topics import create_topics
from forgemq_run_view.view import RunView
from forgemq_shell.records import emit_of
from tests.unit.run_view.synthetic import SyntheticRun, started

HELD = tuple(NamedValue(name=f"G{n}", value=1.0) for n in range(1, 6))
GONE = "deleted"
SHUT = "of-others"


class Remote:
    """A log whose answers take time, as those over a network do."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        call = getattr(self._log, name)

        async def answer(*given: object, **named: object) -> Any:
            await asyncio.sleep(0)
            return await call(*given, **named)

        return answer


class Runs:
    """A broker in memory with runs on it, and a console that shows them."""

    def __init__(self) -> None:
        self.shared = MemoryLog(run="own")
        self.present: set[str] = set()
        self.opened: list[str] = []
        self.failures: dict[str, Exception] = {}
        self.runs = OtherRuns(
            self.shared,
            Broker(open_log=self._open, present=self._present),
            episodes_max=8,
            read_every_s=0.0,
        )

    async def add(self, run: str, *, steps: int, at_ms: int, ended_ms: int | None = None) -> None:
        """Announce a run of so many trained steps of three; with a time it has ended then."""
        log = self.shared.open(run=run)
        begun = started(run=run)
        begun = msgspec.structs.replace(begun, started_ms=at_ms)
        await create_topics(log, begun.configuration)
        writer = await log.writer()
        shared = [(STARTED_RUNS, begun)]
        if ended_ms is not None:
            end = EndedRun(run=run, reason="completed", ended_ms=ended_ms, results=HELD)
            shared.append((ENDED_RUNS, end))
        played = SyntheticRun(run=run).play(steps=steps)
        outputs = [Output(topic=topic.name, partition=0, record=record) for topic, record in shared]
        outputs += [
            Output(topic=m.topic, partition=m.partition, record=m.record) for m in played.messages
        ]
        await writer.write_all([emit_of(output) for output in outputs])
        self.present.add(run)

    def _open(self, begun: StartedRun) -> Log:
        if begun.run in self.failures:
            raise self.failures[begun.run]
        self.opened.append(begun.run)
        return cast("Log", Remote(self.shared.open(run=begun.run)))

    async def look(self, run: str) -> None:
        async with self.runs.opened(run):
            pass

    async def _present(self) -> Collection[str]:
        return self.present

    def application(self) -> FastAPI:
        """The console of another run on this broker."""

        async def read_group(group_id: str, _: str | None) -> GroupView:
            return GroupView(group_id=group_id, episode_ids=(), episode=None)

        app = web(RunView(started(run="own")), clock_ms=lambda: 200_000, read_group=read_group)
        add_runs(app, self.runs, clock_ms=lambda: 200_000)
        return app

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.application())
        return httpx.AsyncClient(transport=transport, base_url="http://console")


@pytest.fixture
async def broker() -> AsyncIterator[Runs]:
    broker = Runs()
    await broker.shared.create_topics(dict.fromkeys((topic.name for topic in SHARED), 1))
    await broker.add("first", steps=3, at_ms=1_000, ended_ms=61_000)
    await broker.add("second", steps=2, at_ms=100_000)
    await broker.add(GONE, steps=1, at_ms=50_000, ended_ms=60_000)
    broker.present.remove(GONE)
    yield broker
    await broker.runs.close()


async def test_the_list_has_the_runs_that_are_on_the_broker_newest_first(broker: Runs) -> None:
    async with broker.client() as http:
        rows = json.loads((await http.get("/api/runs")).content)
    assert [(row["run"], row["ended"], row["ended_ms"]) for row in rows] == [
        ("second", "", None),
        ("first", "completed", 61_000),
    ]
    assert (rows[0]["steps"], rows[0]["domains"], rows[0]["model"]) == (3, ["shop_desk"], "model")
    assert rows[1]["results"] == {f"G{n}": 1.0 for n in range(1, 6)}


async def test_a_run_that_is_over_is_opened_as_it_was_at_its_end(broker: Runs) -> None:
    async with broker.client() as http:
        assert (await http.get("/runs/first/")).text == (await http.get("/")).text
        state = json.loads((await http.get("/runs/first/api/state")).content)
        rows = json.loads((await http.get("/runs/first/api/groups")).content)
        group = json.loads((await http.get("/runs/first/api/groups/g-5")).content)
    assert (state["run"], state["ended"], state["steps_trained"]) == ("first", "completed", 3)
    assert (state["now_ms"], state["stall"]) == (61_000, None)
    assert [row["group_id"] for row in rows] == [f"g-{n}" for n in range(5, -1, -1)]
    assert [turn["reward"]["advantage"] for turn in group["episode"]["turns"]] == [0.3, 0.3]


async def test_a_run_that_is_up_is_read_on_when_somebody_asks_again(broker: Runs) -> None:
    async with broker.client() as http:
        before = json.loads((await http.get("/runs/second/api/state")).content)
        writer = await broker.shared.open(run="second").writer()
        run = SyntheticRun(run="second").play(steps=2)
        written = len(run.messages)
        run.train(2, [run.generate(4 + i, version=2) for i in range(2)])
        outputs = [
            Output(topic=m.topic, partition=m.partition, record=m.record)
            for m in run.messages[written:]
        ]
        await writer.write_all([emit_of(output) for output in outputs])
        after = json.loads((await http.get("/runs/second/api/state")).content)
    assert (before["steps_trained"], after["steps_trained"]) == (2, 3)
    assert before["now_ms"] == after["now_ms"] == 200_000
    assert broker.opened == ["second"]


async def test_a_comparison_has_the_curves_and_the_report_of_each_run(broker: Runs) -> None:
    async with broker.client() as http:
        first = json.loads((await http.get("/api/runs/first/compared")).content)
        second = json.loads((await http.get("/api/runs/second/compared")).content)
    assert [point["step"] for point in first["state"]["points"]] == [0, 1, 2]
    assert [point["step"] for point in second["state"]["points"]] == [0, 1]
    report = first["report"]
    assert (report["reason"], report["steps"], report["duration_s"]) == ("completed", 3, 60.0)
    assert (report["merge_ratio_per_request"], report["merge_ratio_append"]) == (3.0, 1.5)
    assert (second["report"]["reason"], second["report"]["duration_s"]) == ("", 100.0)
    assert all(second["report"]["guarantees"].values())
    assert (first["left_out"], second["left_out"]) == ("", "")


async def test_a_run_that_cannot_be_shown_is_refused_with_the_reason(broker: Runs) -> None:
    await broker.add(SHUT, steps=1, at_ms=9)
    broker.failures[SHUT] = AccessError("user console may not read of-others.retired-groups-v1")
    await broker.add("away", steps=1, at_ms=10)
    broker.failures["away"] = LogUnavailableError("broker:9092 did not answer within 30 s")
    await broker.add("cloud", steps=1, at_ms=11)
    broker.failures["cloud"] = ImportError("Install s3fs to access S3")
    async with broker.client() as http:
        answers = {
            run: await http.get(f"/runs/{run}/api/state")
            for run in ("nobody", GONE, SHUT, "away", "cloud", "NO_ID")
        }
    assert {run: answer.status_code for run, answer in answers.items()} == {
        "nobody": 404,
        GONE: 404,
        SHUT: 403,
        "away": 503,
        "cloud": 404,
        "NO_ID": 422,
    }
    assert answers["nobody"].text == "there is no run nobody on this broker\n"
    assert answers[GONE].text == "run deleted has no topics that this console may read\n"
    assert answers["cloud"].text.endswith("are in /blobs: Install s3fs to access S3\n")


async def test_the_run_that_nobody_looked_at_for_longest_is_closed_for_the_next(
    broker: Runs,
) -> None:
    names = [f"run-{n}" for n in range(OPEN_MAX)]
    for name in names:
        await broker.add(name, steps=1, at_ms=7)
        await broker.look(name)
    await broker.look(names[0])
    await broker.look("first")
    await broker.look(names[0])
    assert broker.opened == [*names, "first"]
    await broker.look(names[1])
    assert broker.opened == [*names, "first", names[1]]


@pytest.mark.slow
async def test_more_runs_than_stay_open_are_all_shown_at_the_same_time(broker: Runs) -> None:
    """One that is closed for another is not closed while somebody reads it."""
    names = [f"run-{n}" for n in range(OPEN_MAX + 2)]
    for name in names:
        await broker.add(name, steps=1, at_ms=7)
    paths = [f"/api/runs/{name}/compared" for name in names]
    paths += [f"/runs/{name}/api/groups/g-0" for name in names]
    async with broker.client() as http:
        answers = await asyncio.gather(*map(http.get, paths))
    assert [(each.status_code, each.text) for each in answers if each.status_code != 200] == []


async def test_every_page_loads_what_it_names_and_nothing_from_elsewhere(broker: Runs) -> None:
    async with broker.client() as http:
        for address in ("/runs/", "/compare/", "/runs/first/"):
            page = await http.get(address)
            assert "default-src 'self'" in page.headers["content-security-policy"]
            assert "//" not in page.text.replace("<!doctype", "")
            named = [
                part.split('"')[1]
                for part in page.text.replace("src=", "href=").split("href=")[1:]
                if part.split('"')[1].endswith((".css", ".js"))
            ]
            assert named
            for name in named:
                loaded = await http.get(f"{address}{name}", follow_redirects=True)
                assert loaded.status_code == 200, (address, name)
        assert (await http.get("/runs/first/settings.py")).status_code == 404
        assert (await http.get("/runs")).headers["location"] == "runs/"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/api/runs", "/api/runs"),
        ("/api/runs/{run}/compared", "/api/runs/first/compared"),
        ("/runs/{run}/api/state", "/runs/first/api/state"),
        ("/runs/{run}/api/groups", "/runs/first/api/groups"),
        ("/runs/{run}/api/groups/{group_id}", "/runs/first/api/groups/g-1"),
    ],
)
async def test_what_is_served_of_runs_is_what_is_described(broker: Runs, path, asked) -> None:
    async with broker.client() as http:
        document = json.loads((await http.get("/api/openapi.json")).content)
        answer = json.loads((await http.get(asked)).content)
    content = document["paths"][path]["get"]["responses"]["200"]["content"]
    schema = {**content["application/json"]["schema"], "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(answer)
