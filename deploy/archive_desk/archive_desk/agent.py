"""The agents: the white-box tool loop at the archive desk, with three ways to treat the context."""

from collections.abc import Sequence
from dataclasses import replace

from archive_desk.archive import inquiry_of
from archive_desk.desk import TURNS_MAX, ArchiveDesk
from forgemq_agents import Episode
from forgemq_agents.contexts import NOTES, SLIDING_WINDOW, ContextRule, ContextTool
from forgemq_agents.tool_loop import run_tool_loop

NOTE = replace(NOTES, says="keep this text, clear the pages").as_tool()
"""The registered notes, described in words of the demo's small vocabulary."""

WINDOW = SLIDING_WINDOW.at(0.5, exchanges=1)
"""The newest page and the call for it: two pages do not fit. At half of the window a page is in."""


async def play(episode: Episode) -> None:
    """Serve one visitor; the policy decides what it notes, and when."""
    await _serve(episode, context_tools=[NOTE])


async def play_in_window(episode: Episode) -> None:
    """Serve one visitor; a fixed rule keeps the newest page."""
    await _serve(episode, context_rules=[WINDOW])


async def play_unmanaged(episode: Episode) -> None:
    """Serve one visitor until the context is full."""
    await _serve(episode)


async def _serve(
    episode: Episode,
    *,
    context_tools: Sequence[ContextTool] = (),
    context_rules: Sequence[ContextRule] = (),
) -> None:
    desk = ArchiveDesk(inquiry_of(episode.task))
    end = await run_tool_loop(
        episode,
        desk,
        turns_max=TURNS_MAX,
        context_tools=context_tools,
        context_rules=context_rules,
    )
    episode.result = {"end": end, "reads": desk.reads}
