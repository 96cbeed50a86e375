"""Runs the stand-in engine as a process; its settings are `FORGEMQ_LOAD_ENGINE_*`."""

import asyncio
import os
from contextlib import suppress

import uvloop
from stand_in_answers import Speed
from stand_in_engine import StandInEngine, serving

from forgemq_settings.environment import parse


class EngineSettings(Speed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast the engine answers, and on which port."""

    port: int


async def main() -> None:
    """Serve until a signal ends the process."""
    settings = parse(EngineSettings, prefix="FORGEMQ_LOAD_ENGINE_", environ=os.environ)
    async with serving(StandInEngine(settings), port=settings.port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        uvloop.run(main())
