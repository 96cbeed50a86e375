"""Who may read the page."""

import asyncio
import base64
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from forgemq_console.access import ConsoleKeys, guarded
from forgemq_console.app import certificate_of, page_server, serve
from forgemq_console.core import GroupView
from forgemq_console.http import web
from forgemq_console.settings import ConsoleSettings
from forgemq_run_view.view import RunView
from forgemq_settings.environment import SettingsError, parse
from forgemq_settings.key_file import PUBLISHED_KEYS
from forgemq_telemetry.telemetry import Telemetry
from tests.certificates import authority
from tests.unit.run_view.synthetic import started

KEY, OTHER = "the-key-of-the-page", "another-key-of-the-page"
PATHS = (
    "/",
    "/console.css",
    "/console.js",
    "/plotly.js",
    "/api/state",
    "/api/groups",
    "/api/groups/g-1",
    "/api/openapi.json",
    "/no-such-path",
)


def keys_of(settings: ConsoleSettings, host: str = "127.0.0.1") -> ConsoleKeys:
    return ConsoleKeys(settings, hosts=(host,), telemetry=Telemetry(service="console"))


async def _no_group(group_id: str, _: str | None) -> GroupView:
    return GroupView(group_id=group_id, episode_ids=(), episode=None)


@asynccontextmanager
async def console(
    keys: ConsoleKeys,
    settings: ConsoleSettings = ConsoleSettings(),  # noqa: B008 - it is frozen
    *,
    trusting: ssl.SSLContext | bool = False,
) -> AsyncIterator[httpx.AsyncClient]:
    """The guarded page on a real socket."""
    app = web(RunView(started()), clock_ms=lambda: 20_000, read_group=_no_group)
    held = socket.create_server(("127.0.0.1", 0))
    scheme = "https" if settings.tls_certificate_file else "http"
    address = f"{scheme}://127.0.0.1:{held.getsockname()[1]}"
    certificate = certificate_of(settings)
    server = page_server(guarded(app, keys), settings, certificate=certificate)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(server, stop, sockets=[held]))
        async with httpx.AsyncClient(base_url=address, verify=trusting) as http:
            yield http
        stop.set()


def basic(user: str, password: str) -> Mapping[str, str]:
    given = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {"authorization": f"Basic {given}"}


REFUSED: Mapping[str, Mapping[str, str]] = {
    "nothing": {},
    "another key": basic("", OTHER),
    "the key as the user": basic(KEY, ""),
    "the beginning of the key": {"authorization": f"Bearer {KEY[:-1]}"},
    "more than the key": {"authorization": f"Bearer {KEY}x"},
    "no base64": {"authorization": f"Basic {KEY}!"},
    "no text": {"authorization": "Basic " + base64.b64encode(b":\xff\xfe").decode()},
    "another scheme": {"authorization": f"Digest {KEY}"},
    "the key alone": {"authorization": KEY},
    "another header": {"x-api-key": KEY},
}


@pytest.mark.slow
async def test_without_the_key_nothing_but_health_is_answered() -> None:
    async with console(keys_of(ConsoleSettings(key=KEY))) as http:
        asked = [(path, REFUSED["nothing"]) for path in PATHS]
        for path, headers in (*asked, *(("/api/state", each) for each in REFUSED.values())):
            answer = await http.get(path, headers=headers)
            assert (answer.status_code, answer.text) == (401, "the console's key is needed\n")
            assert answer.headers["www-authenticate"].startswith("Basic realm=")
        assert (await http.get("/health")).text == "ok\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "headers", [basic("", KEY), basic("anyone", KEY), {"authorization": f"bearer  {KEY}"}]
)
async def test_the_key_is_a_password_of_any_user_or_a_bearer_token(
    headers: Mapping[str, str],
) -> None:
    async with console(keys_of(ConsoleSettings(key=KEY))) as http:
        assert "<html" in (await http.get("/", headers=headers)).text
        assert (await http.get("/api/state", headers=headers)).json()["run"] == "r"


@pytest.mark.slow
async def test_the_page_and_its_key_go_over_tls_with_a_certificate(tmp_path: Path) -> None:
    ca = authority()
    certificate, key = ca.write_server(tmp_path)
    settings = ConsoleSettings(
        key=KEY, tls_certificate_file=str(certificate), tls_key_file=str(key)
    )
    trusting = ssl.create_default_context(cafile=str(ca.write(tmp_path / "ca.pem")))
    async with console(keys_of(settings), settings, trusting=trusting) as http:
        assert http.base_url.scheme == "https"
        assert (await http.get("/api/state", headers=basic("", KEY))).json()["run"] == "r"
        async with httpx.AsyncClient() as distrusting:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await distrusting.get(http.base_url)


@pytest.mark.slow
async def test_a_reader_with_the_key_can_change_nothing() -> None:
    async with console(keys_of(ConsoleSettings(key=KEY))) as http:
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            for path in PATHS:
                answer = await http.request(method, path, headers=basic("", KEY))
                assert answer.status_code in (404, 405)


@pytest.mark.slow
async def test_a_key_is_added_and_taken_away_while_the_page_is_served(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(KEY)
    async with console(keys_of(ConsoleSettings(key_file=str(path)))) as http:

        async def statuses() -> list[int]:
            asked = [await http.get("/api/state", headers=basic("", key)) for key in (KEY, OTHER)]
            return [answer.status_code for answer in asked]

        assert await statuses() == [200, 401]
        path.write_text(f"{OTHER}\n{KEY}\n")
        assert await statuses() == [200, 200]
        path.write_text("short\n")
        assert await statuses() == [200, 200]
        path.unlink()
        assert await statuses() == [200, 200]
        path.write_text(f"{OTHER}\n")
        assert await statuses() == [401, 200]


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "console"])
def test_a_page_that_other_machines_reach_needs_a_key_of_its_own(host: str) -> None:
    with pytest.raises(SettingsError, match=rf"^FORGEMQ_CONSOLE_KEY: must be set.*{host}"):
        keys_of(ConsoleSettings(), host)
    for published in PUBLISHED_KEYS:
        with pytest.raises(SettingsError, match="the documents show"):
            keys_of(ConsoleSettings(key=published), host)
    assert not keys_of(ConsoleSettings(key=KEY), host).admit("")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_on_loopback_the_page_is_open_unless_a_key_is_set(host: str) -> None:
    assert keys_of(ConsoleSettings(), host).admit("")
    assert not keys_of(ConsoleSettings(key=KEY), host).admit("")


def test_no_plain_key_is_kept() -> None:
    keys = keys_of(ConsoleSettings(key=KEY))
    assert keys.admit(f"Bearer {KEY}")
    assert KEY not in str(vars(keys))


def test_a_short_key_is_refused_without_being_shown() -> None:
    with pytest.raises(SettingsError, match=r"^FORGEMQ_CONSOLE_KEY: ") as refused:
        parse(
            ConsoleSettings,
            prefix="FORGEMQ_CONSOLE_",
            environ={"FORGEMQ_CONSOLE_KEY": "short-secret"},
        )
    assert "short-secret" not in str(refused.value)
