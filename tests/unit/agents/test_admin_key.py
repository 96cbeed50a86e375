"""The admin key of the agents: from a setting, or a file that may change while they play."""

import io
import json
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from forgemq_agents.admin_key import AdminKeyFile, admin_key_of
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.requests import JsonRequests, Retry
from forgemq_agents.settings import ImportSettings
from forgemq_settings.environment import SettingsError
from forgemq_telemetry.telemetry import Telemetry

OLD, NEW = "the-old-admin-key-0", "the-new-admin-key-1"
URL = "http://127.0.0.1:9"
key_of = partial(admin_key_of, telemetry=Telemetry(service="agents"))


async def test_a_call_has_the_key_that_the_file_has_at_that_moment(tmp_path: Path) -> None:
    path, seen, events = tmp_path / "keys", [], io.StringIO()
    telemetry = Telemetry(service="agents", stream=events)

    async def renew(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        return web.json_response({"lease_s": 1.0})

    app = web.Application()
    app.router.add_post("/v1/episodes/{id}/heartbeat", renew)
    path.write_text(f"{OLD}\n")
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        gateway = GatewayClient(
            JsonRequests(http, retry=Retry()),
            url=str(server.make_url("")).rstrip("/"),
            admin_key=AdminKeyFile(str(path), telemetry=telemetry),
        )
        for text in (f"{OLD}\n", f"{OLD}\n{NEW}\n", f"{NEW}\n{OLD}\n", "too short", f"{NEW}\n"):
            path.write_text(text)
            await gateway.renew_lease("g-1.0.0")
    assert seen == [f"Bearer {key}" for key in (OLD, OLD, NEW, NEW, NEW)]
    (kept,) = map(json.loads, events.getvalue().splitlines())
    assert kept["event"] == "admin_key_kept"
    assert kept["error"].endswith("key 1 must have at least 16 characters")


def test_the_file_decides_and_without_it_the_setting(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(NEW)
    both = key_of(ImportSettings(gateway_url=URL, admin_key=OLD, admin_key_file=str(path)))
    assert isinstance(both, AdminKeyFile)
    assert both.current() == NEW
    assert key_of(ImportSettings(gateway_url=URL, admin_key=OLD)) == OLD


def test_of_a_setting_with_several_lines_as_a_file_has_them_the_first_is_sent() -> None:
    """As a cluster's secret is while one key replaces another."""
    text = f"# the newest first\n\n{NEW}\n{OLD}\n"
    assert key_of(ImportSettings(gateway_url=URL, admin_key=text)) == NEW
    with pytest.raises(SettingsError, match=r"^FORGEMQ_AGENTS_ADMIN_KEY: must be set, or"):
        key_of(ImportSettings(gateway_url=URL, admin_key="\n"))


def test_a_start_without_a_key_or_without_its_file_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^FORGEMQ_AGENTS_ADMIN_KEY: must be set, or"):
        key_of(ImportSettings(gateway_url=URL))
    with pytest.raises(SettingsError, match=r"^FORGEMQ_AGENTS_ADMIN_KEY_FILE: No such file"):
        key_of(ImportSettings(gateway_url=URL, admin_key_file=str(tmp_path / "none")))
