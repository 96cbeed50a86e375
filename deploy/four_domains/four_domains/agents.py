"""The agents: one question and its answer, or the tool loop at the booking desk."""

from forgemq_agents import Episode
from forgemq_agents.tool_loop import run_tool_loop
from four_domains.bookings import TURNS_MAX, BookingDesk


async def ask(episode: Episode) -> None:
    """Ask once; the rewards read the completion."""
    await episode.chat(messages=[{"role": "user", "content": episode.task["question"]}])


async def book(episode: Episode) -> None:
    """Serve one visitor of the booking desk."""
    desk = BookingDesk(episode.task)
    end = await run_tool_loop(episode, desk, turns_max=TURNS_MAX)
    episode.result = {"end": end, "booked": desk.booked}
