"""A headless browser for the tests of the page, spoken to over its DevTools protocol."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
START_TIMEOUT_S = 60.0
SHOWN_TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.05
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # It cannot be had as root, and the page is our own.
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-port=0",
)


def browser_program() -> str | None:
    """The first browser that this machine has."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """A browser process with a profile of its own.

    Lifecycle: `start`, `tab` for each page, `stop`.
    """

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ""

    def start(self) -> None:
        """Start it and wait until it says where it listens."""
        program = browser_program()
        assert program is not None
        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        said, deadline_s = self._profile / "DevToolsActivePort", time.monotonic() + START_TIMEOUT_S
        while not (said.is_file() and said.read_text().count("\n")):
            assert self._process.poll() is None, "the browser ended at its start"
            assert time.monotonic() < deadline_s, "the browser does not listen"
            time.sleep(LOOK_EVERY_S)
        self._address = f"http://127.0.0.1:{said.read_text().split()[0]}"

    def stop(self) -> None:
        """End it with all its processes."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(timeout=START_TIMEOUT_S)

    @asynccontextmanager
    async def tab(self, url: str) -> AsyncIterator["Tab"]:
        """A new page at `url`."""
        async with (
            aiohttp.ClientSession() as http,
            http.put(f"{self._address}/json/new?{url}") as answer,
            http.ws_connect((await answer.json())["webSocketDebuggerUrl"]) as socket,
        ):
            yield Tab(socket)


class Tab:
    """One page: what it shows, and clicks on it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._calls = 0

    async def text(self, selector: str) -> str:
        """What the first element that matches shows; "" if there is none."""
        return str(await self.value(f"document.querySelector({selector!r})?.textContent ?? ''"))

    async def class_name(self, selector: str) -> str:
        """Classes of the first element that matches; "" if there is none."""
        return str(await self.value(f"document.querySelector({selector!r})?.className ?? ''"))

    async def click(self, selector: str, *, with_text: str) -> None:
        """Click the first element with this text, once there is one."""
        found = f"[...document.querySelectorAll({selector!r})]"
        chosen = f"{found}.find((each) => each.textContent === {with_text!r})"
        click = f"(() => {{ const e = {chosen}; e?.click(); return Boolean(e); }})()"
        deadline_s = time.monotonic() + SHOWN_TIMEOUT_S
        while not await self.value(click):
            assert time.monotonic() < deadline_s, f"no {selector} shows {with_text!r}"
            await asyncio.sleep(LOOK_EVERY_S)

    async def press(self, selector: str) -> None:
        """Click the first element that matches, once there is one and it can be used."""
        press = (
            f"(() => {{ const e = document.querySelector({selector!r}); "
            "if (!e || e.disabled) return false; e.click(); return true; })()"
        )
        deadline_s = time.monotonic() + SHOWN_TIMEOUT_S
        while not await self.value(press):
            assert time.monotonic() < deadline_s, f"{selector} cannot be pressed"
            await asyncio.sleep(LOOK_EVERY_S)

    async def texts(self, selector: str) -> list[str]:
        """What every element that matches shows."""
        found = f"[...document.querySelectorAll({selector!r})].map((each) => each.textContent)"
        return list(await self.value(found))

    async def text_with(self, selector: str, part: str) -> str:
        """The text of an element as soon as it has this part."""
        shown, deadline_s = "", time.monotonic() + SHOWN_TIMEOUT_S
        while part not in shown:
            assert time.monotonic() < deadline_s, f"{selector} shows {shown!r}, without {part!r}"
            await asyncio.sleep(LOOK_EVERY_S)
            shown = await self.text(selector)
        return shown

    async def value(self, expression: str) -> Any:
        """What an expression in the page gives, as data."""
        self._calls += 1
        request = {"expression": expression, "returnByValue": True}
        await self._socket.send_json(
            {"id": self._calls, "method": "Runtime.evaluate", "params": request}
        )
        while (answer := await self._socket.receive_json()).get("id") != self._calls:
            pass
        assert "exceptionDetails" not in answer["result"], answer
        return answer["result"]["result"].get("value")
