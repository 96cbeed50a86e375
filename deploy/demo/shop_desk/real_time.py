"""The shop desk by the clock on the wall: its tools take the seconds that they say.

`agent = "shop_desk.real_time:play"` and `speed = "shop_desk.real_time:speed"` in place of those of
the run file's queue; everything else is as in the demo.
"""

import asyncio

from forgemq_agents import Completion, Episode
from forgemq_agents.tool_loop import Move, run_tool_loop
from forgemq_contracts.grading import GradingEpisode
from shop_desk.environment import TURN_S, TURNS_MAX, ShopDesk
from shop_desk.rewards import SPEED_MIN, outcome, serial_s
from shop_desk.shop import Order, order_of


class RealTimeDesk(ShopDesk):
    """A desk whose answers come once its own clock has moved: calls of one turn wait together."""

    def __init__(self, order: Order, episode: Episode) -> None:
        super().__init__(order)
        self._episode = episode

    async def answer(self, completion: Completion) -> Move:
        """As the desk's, after the seconds that the turn's calls take."""
        before_s = self.clock_s
        with self._episode.tool():
            move = await super().answer(completion)
            await asyncio.sleep(max(0.0, self.clock_s - before_s - TURN_S))
        return move


async def play(episode: Episode) -> None:
    """Serve one customer, in real time."""
    desk = RealTimeDesk(order_of(episode.task), episode)
    end = await run_tool_loop(episode, desk, turns_max=TURNS_MAX)
    episode.result = {"end": end, "price_calls": desk.price_calls}


def speed(episode: GradingEpisode) -> float:
    """1 - completion time / seconds of serial work, between -0.5 and 1; 0 for wrong answers.

    The completion time is what the record says: engine time on the critical path as if each turn
    had run alone in its engine, and the time of the tools.
    """
    if outcome(episode) == 0.0:
        return 0.0
    saved = 1.0 - episode.completion_s / serial_s(order_of(episode.task))
    return min(1.0, max(SPEED_MIN, saved))
