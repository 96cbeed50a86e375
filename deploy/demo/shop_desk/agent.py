"""The agent: the white-box tool loop at the shop desk."""

from forgemq_agents import Episode
from forgemq_agents.tool_loop import run_tool_loop
from shop_desk.environment import TURNS_MAX, ShopDesk
from shop_desk.shop import order_of


async def play(episode: Episode) -> None:
    """Serve one customer."""
    desk = ShopDesk(order_of(episode.task))
    end = await run_tool_loop(episode, desk, turns_max=TURNS_MAX)
    episode.virtual_s = desk.clock_s
    episode.result = {
        "end": end,
        "virtual_s": desk.clock_s,
        "price_calls": desk.price_calls,
        "is_parallel": desk.prices_at_once_max > 1,
        "bad_calls": desk.bad_calls,
        "notes": desk.notes,
    }
