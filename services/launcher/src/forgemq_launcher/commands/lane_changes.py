"""`forgemq lanes`, and the commands that change a lane of a run that is up."""

import http.client
import urllib.error
import urllib.request
from typing import TypeVar

import msgspec
from msgspec import Struct
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from forgemq_contracts.admin import Refusal
from forgemq_contracts.admin_routes import Route
from forgemq_contracts.engine_address import engine_address
from forgemq_contracts.lane_plan import LaneChange
from forgemq_contracts.lane_routes import (
    ADD_LANE,
    DRAIN_LANE,
    LIST_LANES,
    REMOVE_LANE,
    RESUME_LANE,
    LaneAddition,
    LaneList,
    LaneStatus,
)
from forgemq_contracts.lanes import LANE_LAPSE_MS
from forgemq_launcher import exit_status
from forgemq_launcher.commands.asked_engine import engine_refusal
from forgemq_launcher.commands.own_gateway import RunGateway
from forgemq_launcher.core.configuration import ConfigurationError
from forgemq_launcher.display.lines import say, show

ANSWER_TIMEOUT_S = 30.0
"""A gateway that starts holds its first requests until it has read its topics, seconds."""

_OF_LANE = {"drain": DRAIN_LANE, "resume": RESUME_LANE, "remove": REMOVE_LANE}

_Answer = TypeVar("_Answer", bound=Struct)


class LaneRefusedError(ConfigurationError):
    """The gateway refused, and nothing changed; the text says why."""


class GatewayAwayError(ConnectionError):
    """The gateway did not answer; the text says why."""


def list_lanes(gateway: RunGateway, console: Console) -> int:
    """Print every lane of the run: what is wanted of it and how it is doing."""
    found = _asked(gateway, LIST_LANES, LaneList)
    show(console, _table(found))
    for lane in found.lanes:  # Whole, which a column of 80 has no room for.
        say(console, f"lane {lane.lane}: {lane.engine_url}")
        if lane.detail:
            say(console, f"lane {lane.lane} cannot serve: {lane.detail}")
    return exit_status.OK


def add_lane(gateway: RunGateway, console: Console, *, lane: int | None, engine_url: str) -> int:
    """Let the run have another lane, and print all of them.

    Raises:
        LaneRefusedError: asked from this machine, on which the run is up, its engine does not
            answer, or cannot serve this run; or as the gateway says.
        GatewayAwayError: the gateway does not answer.
    """
    engine_url = engine_url.rstrip("/")
    addition = _addition(lane, engine_url)
    if engine_url and gateway.model and (why := engine_refusal(engine_url, gateway.model)):
        raise LaneRefusedError(f"--engine: {why}")
    added = _asked(gateway, ADD_LANE, LaneStatus, body=addition)
    say(console, f"lane {added.lane} is added; it takes requests once its engine serves")
    if not gateway.is_here:
        say(
            console,
            f"start its process: FORGEMQ_INFERENCE_LANE={added.lane} "
            f"FORGEMQ_INFERENCE_ENGINE_URL={engine_url or '...'} python -m forgemq_inference",
        )
    return list_lanes(gateway, console)


def change_lane(gateway: RunGateway, console: Console, change: LaneChange, *, lane: int) -> int:
    """Drain, resume or remove a lane, and print all of them.

    Raises:
        LaneRefusedError: as the gateway says.
        GatewayAwayError: the gateway does not answer.
    """
    route = _OF_LANE[change]
    _asked(gateway, route, route.answer, path=route.path.format(lane=lane))
    return list_lanes(gateway, console)


def _addition(lane: int | None, engine_url: str) -> LaneAddition:
    """The body of the request, checked before anything is asked."""
    given = {"engine_url": engine_url, "lane": lane}
    if engine_url and engine_address(engine_url) is None:
        raise LaneRefusedError(
            f"--engine must be an address such as http://10.0.0.7:30000, got {engine_url!r}"
        )
    try:
        return msgspec.convert(given, LaneAddition)
    except msgspec.ValidationError as error:
        raise LaneRefusedError(f"--engine, --lane: {error}") from error


def _asked(
    gateway: RunGateway,
    route: Route,
    answer: type[_Answer],
    *,
    path: str = "",
    body: Struct | None = None,
) -> _Answer:
    request = urllib.request.Request(
        gateway.url + (path or route.path),
        method=route.method,
        data=None if body is None else msgspec.json.encode(body),
        headers={
            "Authorization": f"Bearer {gateway.admin_key}",
            "Content-Type": "application/json",
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
            return msgspec.json.decode(response.read(), type=answer)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(error.code, error.read()) from error
    except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
        raise GatewayAwayError(f"the gateway at {gateway.url} did not answer: {error}") from error


def _refusal(status: int, body: bytes) -> LaneRefusedError:
    try:
        message = msgspec.json.decode(body, type=Refusal).error.message
    except msgspec.MsgspecError:
        message = body[:200].decode(errors="replace")
    return LaneRefusedError(f"{message} (HTTP {status})")


def _table(found: LaneList) -> Table:
    shown = Table(
        *(Column(name, no_wrap=True) for name in ("lane", "wanted")),
        "is",
        *(Column(name, no_wrap=True) for name in ("weights", "running", "queued")),
        *(Column(name, no_wrap=True) for name in ("reads\ntokens/s", "cache")),
        box=SIMPLE,
        show_edge=False,
    )
    for lane in found.lanes:
        shown.add_row(
            str(lane.lane),
            lane.state,
            _is(lane),
            f"{lane.lineage}.{lane.version}",
            str(lane.running),
            str(lane.queued),
            f"{lane.prefill_tokens_per_s:.0f}" if lane.prefill_tokens_per_s else "-",
            f"{lane.used_tokens / lane.capacity_tokens:.0%}" if lane.capacity_tokens else "-",
        )
    shown.caption = f"{len(found.lanes)} of at most {found.lanes_max} lanes"
    return shown


def _is(lane: LaneStatus) -> str:
    if lane.silent_s is None:
        return "not started"
    if 1000 * lane.silent_s > LANE_LAPSE_MS:
        return f"silent for {lane.silent_s:.0f} s"
    if lane.takes_requests:
        return "takes requests"
    return "drained" if lane.state == "drained" else "starting or behind"
