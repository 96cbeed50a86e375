"""Tool time is the time in which a tool ran and nothing was sampled."""

from contextlib import ExitStack

from forgemq_agents.tool_clock import ToolClock


class Play:
    """A clock that the test moves, and blocks that it opens and closes."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.clock = ToolClock(lambda: self.now_s)
        self._open: dict[str, ExitStack] = {}

    def begin(self, name: str, *, at: float) -> None:
        self.now_s = at
        stack = self._open[name] = ExitStack()
        block = self.clock.tool if name.startswith("tool") else self.clock.turn
        stack.enter_context(block())

    def end(self, name: str, *, at: float) -> None:
        self.now_s = at
        self._open.pop(name).close()


def test_tools_that_run_at_once_count_once_and_a_turn_beside_a_tool_hides_it():
    play = Play()
    play.begin("tool-a", at=0)
    play.begin("tool-b", at=1)
    play.end("tool-a", at=3)
    play.begin("turn", at=4)
    play.end("tool-b", at=5)
    play.end("turn", at=6)
    assert play.clock.total_s == 4.0


def test_one_tool_after_the_other_counts_each_and_what_lies_between_counts_nothing():
    play = Play()
    for start in (0, 10):
        play.begin("tool", at=start)
        play.end("tool", at=start + 2)
        play.begin("turn", at=start + 3)
        play.end("turn", at=start + 5)
    assert play.clock.total_s == 4.0


def test_a_tool_that_still_runs_counts_up_to_now():
    play = Play()
    play.begin("tool", at=1)
    play.now_s = 2.5
    assert play.clock.total_s == 1.5
    play.end("tool", at=3)
    assert play.clock.total_s == 2.0
