"""What the console serves to its page, and its description."""

import asyncio
import json
import os
import socket

import httpx
import jsonschema
import msgspec
import pytest
import uvicorn

from forgemq_console.app import inherited_sockets, serve
from forgemq_console.core import CURVE_POINTS_MAX, GroupView, bounded, group_view
from forgemq_console.http import web
from forgemq_console.settings import ConsoleSettings
from forgemq_contracts.topics import FINISHED_COMPLETIONS
from forgemq_run_view.view import RunView
from tests.unit.run_view.synthetic import SyntheticRun, started


@pytest.fixture
def run() -> SyntheticRun:
    return SyntheticRun().play(steps=2)


@pytest.fixture
def view(run) -> RunView:
    view = RunView(started())
    for message in run.messages:
        view.apply(message)
    return view


def client(view: RunView, run: SyntheticRun) -> httpx.AsyncClient:
    async def read_group(group_id: str, episode_id: str | None):
        of_group = (m for m in run.messages if getattr(m.record, "group_id", "") == group_id)
        return group_view(group_id, of_group, episode_id=episode_id, token_text=str, episodes_max=8)

    app = web(view, clock_ms=lambda: 20_000, read_group=read_group)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://console")


def test_a_turn_shows_context_and_sampled_tokens_with_logprob_and_version(run):
    found = group_view(
        "g-2",
        [m for m in run.of(FINISHED_COMPLETIONS) if m.record.group_id == "g-2"],
        episode_id="g-2.1.0",
        token_text=lambda token: f"<{token}>",
        episodes_max=8,
    )
    assert found.episode_ids == ("g-2.0.0", "g-2.1.0")
    assert found.episode is not None
    first, second = found.episode.turns
    assert [token.text for token in first.context] == ["<7>", "<8>", "<9>"]
    assert [(t.id, t.logprob, t.version) for t in first.output] == [
        (20, -0.25, 1),
        (31, -0.5, 1),
        (2, -0.125, 1),
    ]
    assert (second.shared_prefix_tokens, second.parent_id) == (6, first.completion_id)


def test_curves_are_thinned_to_their_limit_and_keep_the_last_point(view):
    state = view.state(now_ms=0)
    many = tuple(
        msgspec.structs.replace(state.points[0], step=step) for step in range(CURVE_POINTS_MAX + 1)
    )
    points = bounded(msgspec.structs.replace(state, points=many)).points
    assert len(points) <= CURVE_POINTS_MAX
    assert points[-1].step == CURVE_POINTS_MAX


def test_few_points_are_all_sent(view):
    state = view.state(now_ms=0)
    assert bounded(state) == state


async def test_the_state_is_served_as_json(view, run):
    async with client(view, run) as http:
        state = json.loads((await http.get("/api/state")).content)
    assert (state["steps_trained"], state["groups_admitted"], state["run"]) == (2, 4, "r")


async def test_groups_are_listed_newest_first(view, run):
    async with client(view, run) as http:
        rows = json.loads((await http.get("/api/groups")).content)
    assert [(row["group_id"], row["position"]) for row in rows] == [
        (f"g-{index}", "trained") for index in (3, 2, 1, 0)
    ]


async def test_rewards_and_advantages_are_served_by_turn(view, run):
    async with client(view, run) as http:
        episode = json.loads((await http.get("/api/groups/g-3")).content)["episode"]
    assert episode["reward"]["total"] == pytest.approx(1.4)
    assert [turn["reward"]["advantage"] for turn in episode["turns"]] == [0.3, 0.3]


async def test_an_unknown_group_is_404_and_a_known_one_comes_with_its_first_episode(view, run):
    async with client(view, run) as http:
        assert (await http.get("/api/groups/g-77")).status_code == 404
        found = json.loads((await http.get("/api/groups/g-1")).content)
    assert found["episode"]["episode_id"] == "g-1.0.0"


async def test_the_page_and_all_it_names_are_served_and_nothing_comes_from_elsewhere(view, run):
    async with client(view, run) as http:
        page = await http.get("/")
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert "//" not in page.text.replace("<!doctype", "")
        for name in ("console.css", "console.js", "charts.js", "trajectory.js", "plotly.js"):
            assert (await http.get(f"/{name}")).status_code == 200
        assert (await http.get("/settings.js")).status_code == 404


async def test_plotly_is_sent_compressed_and_cacheable(view, run):
    async with client(view, run) as http:
        answer = await http.get("/plotly.js", headers={"accept-encoding": "gzip"})
        plain = await http.get("/plotly.js", headers={"accept-encoding": "identity"})
    assert answer.headers["content-encoding"] == "gzip"
    assert "immutable" in answer.headers["cache-control"]
    assert answer.text == plain.text


def test_the_console_writes_nothing_and_reads_only_what_names_it():
    from forgemq_console.app import CONSUMES, PRODUCES

    assert PRODUCES == ()
    assert all("console" in topic.consumers for topic in CONSUMES)


async def described(view, run) -> dict:
    async with client(view, run) as http:
        return json.loads((await http.get("/api/openapi.json")).content)


async def test_every_address_that_the_page_asks_for_is_described(view, run):
    document = await described(view, run)
    assert sorted(document["paths"]) == [
        "/api/groups",
        "/api/groups/{group_id}",
        "/api/state",
        "/health",
    ]
    assert all("summary" in path["get"] for path in document["paths"].values())
    (group_id, episode) = document["paths"]["/api/groups/{group_id}"]["get"]["parameters"]
    assert (group_id["in"], group_id["schema"]["pattern"]) == ("path", "^[a-z0-9-]{1,64}$")
    assert (episode["in"], episode["required"]) == ("query", False)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/api/state", "/api/state"),
        ("/api/groups", "/api/groups"),
        ("/api/groups/{group_id}", "/api/groups/g-1?episode=g-1.1.0"),
    ],
)
async def test_what_is_served_is_what_is_described(view, run, path, asked):
    document = await described(view, run)
    content = document["paths"][path]["get"]["responses"]["200"]["content"]
    schema = {**content["application/json"]["schema"], "components": document["components"]}
    async with client(view, run) as http:
        answer = json.loads((await http.get(asked)).content)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(answer)
    assert list(validator.iter_errors({"unknown": [answer]}))


@pytest.mark.parametrize(
    "address", ["/api/groups/G_1", "/api/groups/" + "g" * 65, "/api/groups/g-1?episode=first"]
)
async def test_an_id_that_cannot_be_one_is_refused(view, run, address):
    async with client(view, run) as http:
        assert (await http.get(address)).status_code == 422


async def test_the_page_is_served_at_a_socket_that_was_handed_down(view, run) -> None:
    async def read_group(group_id: str, _: str | None) -> GroupView:
        return GroupView(group_id=group_id, episode_ids=(), episode=None)

    app = web(view, clock_ms=lambda: 20_000, read_group=read_group)
    with socket.create_server(("127.0.0.1", 0)) as held:
        settings = ConsoleSettings(port=1, listener_fd=os.dup(held.fileno()))
        server, stop = uvicorn.Server(uvicorn.Config(app, log_config=None)), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve(server, stop, sockets=inherited_sockets(settings)))
            async with httpx.AsyncClient() as http:
                answer = await http.get(f"http://127.0.0.1:{held.getsockname()[1]}/health")
            assert answer.text == "ok\n"
            stop.set()
