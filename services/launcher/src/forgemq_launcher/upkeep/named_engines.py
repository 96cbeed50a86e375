"""Engines that FORGEMQ_ENGINE_URL names: watched, never started or stopped."""

import asyncio
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from forgemq_contracts.engine_address import engine_address
from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.upkeep.machine import MachineError
from forgemq_launcher.upkeep.supervisor import Note

LOOK_EVERY_S = 2.0
"""For the panel only: inference itself notices an engine that is lost."""
ANSWER_TIMEOUT_S = 10.0
"""A health check waits while the engine's main process is busy, seconds at most."""
VARIABLE = "FORGEMQ_ENGINE_URL"


def named_urls(value: str, *, lanes: int) -> tuple[str, ...]:
    """The addresses in FORGEMQ_ENGINE_URL; () if it is empty.

    Raises:
        MachineError: an address names no server or comes twice, or there is not one for each lane.
    """
    urls = tuple(url.strip().rstrip("/") for url in value.split(",") if url.strip())
    addresses = [engine_address(url) for url in urls]
    for url, address in zip(urls, addresses, strict=True):
        if address is None:
            raise MachineError(
                f"{VARIABLE}: an address looks like http://10.0.0.7:30000, got {url!r}"
            )
        if addresses.count(address) > 1:
            raise MachineError(f"{VARIABLE} names {url} twice: one engine is one lane")
    if urls and len(urls) != lanes:
        raise MachineError(
            f"{VARIABLE} names {len(urls)} engines, the run has log.lanes={lanes}: "
            "one engine is one lane"
        )
    return urls


def check_lanes_unnamed(configuration: RunConfiguration) -> None:
    """Refuse `lanes` beside engines that FORGEMQ_ENGINE_URL names.

    Raises:
        MachineError: the run's file says how the launcher starts engines.
    """
    if configuration.lanes:
        raise MachineError(
            f"lanes must be left out if {VARIABLE} names the engines: it says how `forgemq run` "
            "starts its own"
        )


class NamedEngines:
    """Has the methods of `Engines`, for servers that belong to somebody else.

    Lifecycle: a task `keep` for each lane; it notes when the engine stops answering and when it
    answers again, and gives up on one that is silent for too long.
    """

    def __init__(self, urls: Sequence[str], *, silence_s_max: float, note: Note) -> None:
        self._urls = tuple(urls)
        self._silence_s_max = silence_s_max
        self._note = note
        self._silent: dict[int, str] = {}
        self._removed: set[int] = set()

    @property
    def urls(self) -> tuple[str, ...]:
        """Address of each lane's engine."""
        return self._urls

    @property
    def prefill_urls(self) -> tuple[str, ...]:
        """Of no lane: a named engine reads its contexts itself."""
        return ()

    @property
    def is_up(self) -> bool:
        """Whether no engine is known to be silent."""
        return not self._silent

    def status(self) -> str:
        """One line: which engine does not answer, or that FORGEMQ_ENGINE_URL names them."""
        if not self._silent:
            return f"named by {VARIABLE}"
        lane = min(self._silent)
        return f"at {self._urls[lane]} does not answer: {self._silent[lane]}"

    def has(self, lane: int) -> bool:
        """Whether the lane's engine is one of these, and was not removed."""
        return lane < len(self._urls) and lane not in self._removed

    async def remove(self, lane: int) -> None:
        """Watch the lane's engine no longer; cancel its task `keep` before."""
        self._removed.add(lane)
        self._silent.pop(lane, None)

    async def stop(self) -> None:
        """Do nothing: those who started these engines stops them."""

    async def keep(self, lane: int) -> None:
        """Watch the lane's engine until cancelled.

        Raises:
            MachineError: it did not answer for `silence_s_max`.
        """
        url = self._urls[lane]
        heard_s = time.monotonic()
        while True:
            refusal = await asyncio.to_thread(health_refusal, url)
            if refusal is None:
                heard_s = time.monotonic()
                if self._silent.pop(lane, None) is not None:
                    self._note(f"engine {lane} answers at {url}")
            else:
                self._note_silence(lane, refusal, silence_s=time.monotonic() - heard_s)
            await asyncio.sleep(LOOK_EVERY_S)

    def _note_silence(self, lane: int, refusal: str, *, silence_s: float) -> None:
        url = self._urls[lane]
        if silence_s > self._silence_s_max:
            raise MachineError(
                f"engine {lane} at {url} did not answer for {silence_s:.0f} s ({refusal}): start "
                f"it, or unset {VARIABLE} for a run that brings its own"
            )
        if lane not in self._silent:
            self._note(
                f"engine {lane} at {url} does not answer ({refusal}); "
                f"waiting up to {self._silence_s_max:.0f} s for it"
            )
        self._silent[lane] = refusal


def health_refusal(url: str) -> str | None:
    """Why the engine at this address does not answer a health check with 200; None if it does."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=ANSWER_TIMEOUT_S) as response:
            return None if response.status == 200 else f"HTTP {response.status}"
    except urllib.error.HTTPError as error:
        with error:
            return f"HTTP {error.code}"
    except urllib.error.URLError as error:
        return str(getattr(error.reason, "strerror", None) or error.reason)
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
