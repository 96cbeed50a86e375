"""A gateway in a thread of its own, for tests that are not asynchronous."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from forgemq_bus.log import Log
from forgemq_contracts.run import RunConfiguration
from tests.unit.gateway.world import ADMIN_KEY, running


@dataclass(frozen=True)
class Served:
    """A gateway in another thread, and an open episode."""

    client: httpx.Client
    url: str
    key: str
    group_id: str
    episode_id: str

    def chat(self, body: bytes) -> httpx.Response:
        return self.client.post(
            f"{self.url}/v1/chat/completions", content=body, headers={"x-api-key": self.key}
        )

    def post(self, body: bytes, *, path: str) -> httpx.Response:
        return self.client.post(f"{self.url}{path}", content=body, headers={"x-api-key": self.key})

    def admin(self, path: str, body: bytes) -> httpx.Response:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        return self.client.post(f"{self.url}{path}", content=body, headers=headers)

    def group(self) -> Any:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        return self.client.get(f"{self.url}/v1/groups/{self.group_id}", headers=headers).json()


@contextmanager
def serving(open_log: Callable[[], Log], configuration: RunConfiguration) -> Iterator[Served]:
    """A gateway on a new log, with an open episode."""
    found: list[Any] = []
    is_ready, is_over = threading.Event(), threading.Event()

    async def serve() -> None:
        try:
            async with running(open_log, configuration, lambda _: "yes") as (world, _):
                found.append((world.base_url, await world.episode()))
                is_ready.set()
                while not is_over.is_set():  # noqa: ASYNC110 - another thread sets it
                    await asyncio.sleep(0.05)
        finally:
            is_ready.set()  # Nobody waits for a gateway that failed.

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert is_ready.wait(60)
        assert found
        url, claim = found[0]
        with httpx.Client(timeout=20) as client:
            yield Served(
                client=client,
                url=url,
                key=claim["key"],
                group_id=claim["group_id"],
                episode_id=claim["episode_id"],
            )
    finally:
        is_over.set()
        thread.join(20)
    assert not thread.is_alive()
