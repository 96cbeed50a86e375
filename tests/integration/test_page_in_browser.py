"""What the page shows, in a real browser."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import uvicorn

from forgemq_bus.errors import LogError
from forgemq_console.access import Application
from forgemq_console.app import serve
from forgemq_console.core import GroupView, group_view
from forgemq_console.http import web
from forgemq_contracts.episodes import ForkCount
from forgemq_contracts.steps import Alarm, TrainedStep
from forgemq_contracts.topics import FINISHED_EPISODES
from forgemq_run_view.forks import MEANINGS
from forgemq_run_view.stall import CONFIRMED_AFTER_MS
from forgemq_run_view.view import RunView
from tests.integration.browser import LOOK_EVERY_S, SHOWN_TIMEOUT_S, Browser, Tab
from tests.unit.console.test_runs import Runs
from tests.unit.console.test_runs import broker as broker
from tests.unit.run_view import live_run
from tests.unit.run_view.imported import imports
from tests.unit.run_view.live_run import LiveRun
from tests.unit.run_view.synthetic import SyntheticRun, started

pytestmark = [pytest.mark.integration, pytest.mark.browser, pytest.mark.timeout(180)]

EDITS = ForkCount(reason="edited", count=3)
KL = Alarm(metric="kl_k3", value=0.21, threshold=0.1)
NOT_READ = "g-1"
"""A group whose records cannot be read."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    running = Browser(tmp_path_factory.mktemp("browser"))
    running.start()
    yield running
    running.stop()


def run_with(*alarms: Alarm) -> tuple[SyntheticRun, RunView]:
    """Two steps of two groups; the second step has the alarms."""
    run, view = SyntheticRun().play(steps=2), RunView(started())
    for message in run.messages:
        record = message.record
        if isinstance(record, TrainedStep) and record.step == 1:
            record = msgspec.structs.replace(record, alarms=alarms)
        view.apply(msgspec.structs.replace(message, record=record))
    return run, view


@asynccontextmanager
async def console(
    run: SyntheticRun | LiveRun, view: RunView, *, now_ms: int = 20_000
) -> AsyncIterator[str]:
    """The console's own application on a port of this machine; its address."""

    async def read_group(group_id: str, episode_id: str | None) -> GroupView:
        if group_id == NOT_READ:
            await unread_group(group_id, episode_id)
        of_group = [m for m in run.messages if getattr(m.record, "group_id", "") == group_id]
        return group_view(group_id, of_group, episode_id=episode_id, token_text=str, episodes_max=8)

    async with served(web(view, clock_ms=lambda: now_ms, read_group=read_group)) as url:
        yield url


async def unread_group(group_id: str, episode_id: str | None) -> GroupView:
    raise LogError("the broker does not answer")


@asynccontextmanager
async def served(app: Application) -> AsyncIterator[str]:
    """An application on a port of this machine; its address."""
    stop = asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None))
        serving = asyncio.create_task(serve(server, stop, sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            stop.set()  # In order after a failure too: else its sockets fail the next test.
            await serving


async def test_a_chosen_group_shows_what_its_episode_and_each_turn_earned(browser):
    async with console(*run_with()) as url, browser.tab(url) as page:
        await page.click("#groups td", with_text="g-3")
        shown = await page.text_with("#trajectory", "advantage")
        assert await page.text("#trajectory-name") == "g-3.0.0"
        assert "total 1.4" in shown
        assert "advantage +0.3" in await page.text("#trajectory .turn h3")
        await page.click("#episodes button", with_text="episode 1, attempt 0")
        await page.text_with("#trajectory-name", "g-3.1.0")


async def test_a_group_that_cannot_be_read_says_so_until_another_is_chosen(browser):
    async with console(*run_with()) as url, browser.tab(url) as page:
        await page.click("#groups td", with_text="g-3")
        await page.text_with("#trajectory", "advantage")
        await page.click("#groups td", with_text=NOT_READ)
        assert (
            await page.text_with("#trajectory", "Not read") == "Not read: 500 Internal Server Error"
        )
        assert await page.text("#trajectory-name") == NOT_READ
        assert await page.text("#episodes") == ""
        await page.click("#groups td", with_text="g-3")
        assert "Not read" not in await page.text_with("#trajectory", "advantage")


async def test_the_table_of_forks_has_reason_count_share_and_meaning(browser):
    run, view = run_with()
    for message in run.of(FINISHED_EPISODES):
        end = msgspec.structs.replace(message.record, group_id="g-forked", fork_reasons=(EDITS,))
        view.apply(msgspec.structs.replace(message, record=end))
    async with console(run, view) as url, browser.tab(url) as page:
        await page.text_with("#forks", "edited")
        cells = [await page.text(f"#forks td:nth-child({column})") for column in range(1, 5)]
    [row] = view.state(now_ms=0).forks
    assert cells == ["edited", "6", f"{100 * row.episodes_share:.1f}%", MEANINGS["edited"]]


async def test_an_alarm_is_counted_in_red_and_listed_with_its_step_value_and_threshold(browser):
    async with console(*run_with(KL)) as url, browser.tab(url) as page:
        await page.text_with("#alarms", "kl_k3")
        cells = [await page.text(f"#alarms td:nth-child({column})") for column in range(1, 5)]
        assert cells == ["1", "kl_k3", "0.210", "above 0.1"]
        assert await page.text("#numbers .bad") == "1alarms"


async def test_a_stalled_run_says_what_it_waits_for_and_one_that_goes_on_says_nothing(browser):
    async with console(*run_with()) as url, browser.tab(url) as page:
        await page.text_with("#run", "r")
        assert await page.text("#stall") == ""
    run, view = LiveRun(0), RunView(live_run.started())
    run.play(200)
    run.stopped.add("merger")
    run.play(400)
    for message in run.messages:
        view.apply(message)
    assert view.state(now_ms=run.now_ms - CONFIRMED_AFTER_MS).stall is None
    async with console(run, view, now_ms=run.now_ms) as url, browser.tab(url) as page:
        shown = await page.text_with("#stall", "merger")
    assert shown.startswith("Waits for merger, for 0:06:")
    assert "(service silent). The merger writes nothing: group" in shown


async def test_a_run_without_alarms_has_no_number_in_red(browser):
    async with console(*run_with()) as url, browser.tab(url) as page:
        await page.text_with("#numbers", "alarms")
        assert await page.class_name("#numbers .bad") == ""
        assert await page.text("#alarms td") == ""


async def test_imports_have_a_row_of_their_own_and_are_shown_by_their_messages(browser):
    run, view = run_with()
    imported = imports(3, outcomes=1)
    run.messages += imported
    for message in imported:
        view.apply(message)
    async with console(run, view) as url, browser.tab(url) as page:
        await page.text_with("#imported", "shop_desk")
        cells = [await page.text(f"#imported td:nth-child({column})") for column in range(1, 6)]
        assert cells == ["shop_desk", "3", "3", "1", "1.000"]
        await page.click("#groups td", with_text="i-0")
        assert "2 + 2?" in await page.text_with("#trajectory", "user (imported)")
        assert "total 1" in await page.text("#trajectory .hint")
        assert await page.text("#trajectory-name") == "i-0.0.0"


async def test_two_runs_of_the_list_are_compared_over_the_same_axes_with_both_reports(
    browser, broker: Runs
):
    async with served(broker.application()) as url, browser.tab(f"{url}runs/") as page:
        await page.text_with("#runs", "first")
        assert await page.texts("#runs a") == ["second", "first"]
        assert await page.value("document.querySelector('#compare').disabled")
        for run in ("first", "second"):
            await page.press(f"#runs input[value={run}]")
        await page.press("#compare")
        await page.text_with("#figures", "G5")
        assert await page.text("#run") == "first and second"
        assert await page.texts("#figures th") == ["", "first", "second"]
        cells = await page.texts("#figures td")
        rows = {cells[at]: tuple(cells[at + 1 : at + 3]) for at in range(0, len(cells), 3)}
        traces = (
            "document.querySelector('#chart-{}').data.map((each) => [each.name, each.x, each.y])"
        )
        saving = await page.value(traces.format("saving"))
        success = await page.value(traces.format("success"))
        rate = await page.value(traces.format("rate"))
        legend = await page.texts("#chart-staleness .legendtext")
    assert rows["end"] == ("completed", "no end yet")
    assert rows["steps"] == ("3", "2")
    assert rows["tree saving, per request"] == ("3.00x", "3.00x")
    assert rows["G4"] == ("held: 0 samples against the log",) * 2, "no auditor compared any"
    assert saving == [["first", [0, 1, 2], [3, 3, 3]], ["second", [0, 1], [3, 3]]]
    assert success[:2] == [["first", [0, 1, 2], [0.5, 1, 1]], ["second", [0, 1], [0.5, 1]]]
    assert [(name, x) for name, x, _ in rate] == [("first", [0]), ("second", [0])]
    assert legend == ["first", "second"]


async def test_a_run_that_is_over_is_opened_again_from_the_list_and_its_groups_are_read(
    browser, broker: Runs
):
    async with served(broker.application()) as url, browser.tab(f"{url}runs/") as page:
        await page.click("#runs a", with_text="first")
        await page.text_with("#phase", "completed")
        assert await page.text("#elapsed") == "0:01:00"
        await page.click("#groups td", with_text="g-5")
        assert "advantage +0.3" in await page.text_with("#trajectory", "advantage")
        await page.press("#all-runs")
        await page.text_with("#runs", "second")


async def test_a_run_that_was_deleted_says_so_in_place_of_its_page(browser, broker: Runs):
    async with served(broker.application()) as url, browser.tab(f"{url}runs/deleted/") as page:
        refusal = "run deleted has no topics that this console may read"
        assert await page.text_with("#connection", "deleted") == refusal


async def ended_fetches(page: Tab, address: str, *, after: int) -> int:
    """How often the page has an answer of this address, once it is more often than `after`."""
    ended = f"performance.getEntriesByName(new URL({address!r}, location.href).href).length"
    deadline_s = time.monotonic() + SHOWN_TIMEOUT_S
    while (count := int(await page.value(ended))) <= after:
        assert time.monotonic() < deadline_s, f"{address} was answered {count} times"
        await asyncio.sleep(LOOK_EVERY_S)
    return count


async def test_what_is_as_before_stays_when_the_page_is_refreshed(browser):
    """Else a click is lost whose button goes down before a refresh and up behind it."""
    async with console(*run_with()) as url, browser.tab(url) as page:
        await page.text_with("#groups", "g-3")
        await page.text_with("#queues", "trained")
        kept = "window.kept = [...document.querySelectorAll('#groups td, #queues .place')]"
        assert await page.value(f"({kept}).length") > 20
        refreshes = await ended_fetches(page, "api/groups", after=0)
        await ended_fetches(page, "api/groups", after=refreshes + 1)
        assert await page.value("window.kept.every((each) => each.isConnected)") is True


async def test_a_console_that_hangs_is_named_until_it_answers_again(browser):
    _, view = run_with()
    app = web(view, clock_ms=lambda: 20_000, read_group=unread_group)
    answers = asyncio.Event()
    answers.set()

    async def held(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await answers.wait()
        await app(scope, receive, send)

    async with served(held) as url, browser.tab(url) as page:
        await page.text_with("#run", "r")
        answers.clear()
        try:
            await page.text_with("#connection", "the console does not answer; retrying")
        finally:
            answers.set()
        deadline_s = time.monotonic() + SHOWN_TIMEOUT_S
        while said := await page.text("#connection"):
            assert time.monotonic() < deadline_s, said
            await asyncio.sleep(LOOK_EVERY_S)


async def test_of_two_episodes_the_one_that_was_chosen_last_is_shown(browser):
    run, view = run_with()
    answers = asyncio.Event()

    async def read_group(group_id: str, episode_id: str | None) -> GroupView:
        if episode_id == "g-3.1.0":
            await answers.wait()
        of_group = [m for m in run.messages if getattr(m.record, "group_id", "") == group_id]
        return group_view(group_id, of_group, episode_id=episode_id, token_text=str, episodes_max=8)

    app = web(view, clock_ms=lambda: 20_000, read_group=read_group)
    async with served(app) as url, browser.tab(url) as page:
        await page.click("#groups td", with_text="g-3")
        await page.click("#episodes button", with_text="episode 1, attempt 0")
        await page.click("#episodes button", with_text="episode 0, attempt 0")
        await ended_fetches(page, "api/groups/g-3?episode=g-3.0.0", after=0)
        answers.set()
        await ended_fetches(page, "api/groups/g-3?episode=g-3.1.0", after=0)
        refreshes = await ended_fetches(page, "api/groups", after=0)
        await ended_fetches(page, "api/groups", after=refreshes)
        assert await page.text("#trajectory-name") == "g-3.0.0"
