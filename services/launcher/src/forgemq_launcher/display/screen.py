"""What the terminal shows: a line for each step of set-up, then the live panel or plain lines."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live

from forgemq_launcher.display.lines import say, show
from forgemq_launcher.display.panel import PanelView, line, panel
from forgemq_run_view.state import RunState

EVENTS_SHOWN_MAX = 6
"""With the 14 other lines of the panel they fit a terminal of 24 lines."""
PLAIN_EVERY_S = 30.0
"""In a log or a pipe: shows that a long step goes on, in few lines beside those of the steps."""


class Screen:
    """The terminal of one run.

    Lifecycle: `say` at any time; between `open` and `close` a terminal shows the panel and `show`
    refreshes it. If stdout is not a terminal, or one that cannot move its cursor (TERM=dumb),
    `show` prints a line for each step and every 30 s.
    Once the terminal or the reader of stdout is gone, nothing more is shown and nothing raises:
    a launcher keeps its run up without it, and a command that only shows a run ends at `is_gone`.
    """

    def __init__(self, console: Console, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock_s = clock_s
        self._started_s = clock_s()
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN_MAX)
        self._live: Live | None = None
        self._last_line_s = -PLAIN_EVERY_S
        self._last_key: tuple[int, int] | None = None
        self.is_gone = False

    @property
    def events(self) -> tuple[str, ...]:
        """The newest lines, oldest first."""
        return tuple(self._events)

    def say(self, text: str) -> None:
        """Show one line: among the panel's events while it is up, else printed."""
        stamped = f"{self._clock_s() - self._started_s:6.1f} s  {text}"
        self._events.append(stamped.splitlines()[0])
        if self._live is None:
            with self._until_gone():
                say(self._console, stamped)

    def print(self, shown: RenderableType) -> None:
        """Print a table or a text as it is; not while the panel is up."""
        with self._until_gone():
            show(self._console, shown)

    def open(self) -> None:
        """Show the panel from here on, if there is a terminal for it."""
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            with self._until_gone():
                self._live.start()

    def show(self, state: RunState, shown: PanelView) -> None:
        """Show the run as it is."""
        if self._live is not None:
            with self._until_gone():
                self._live.update(panel(state, shown), refresh=True)
            return
        key = (state.steps_trained, sum(point.groups_ended for point in state.evaluations))
        now_s = self._clock_s()
        is_new_step = self._last_key is None or key[0] != self._last_key[0]
        if is_new_step or now_s - self._last_line_s >= PLAIN_EVERY_S:
            self._last_key, self._last_line_s = key, now_s
            self.say(line(state, is_judging=shown.is_judging))
            if not shown.is_engine_up:
                self.say(f"engine {shown.engine_status}")

    def close(self) -> None:
        """Leave the panel as it is and print plainly again; idempotent."""
        if self._live is not None:
            with self._until_gone():
                self._live.stop()
            self._live = None

    @contextmanager
    def _until_gone(self) -> Iterator[None]:
        """Silence the console for good if what is shown in this block cannot be written."""
        try:
            yield
        except (OSError, SystemExit):  # A broken pipe: rich's Console raises SystemExit.
            self._console.quiet = True
            self.is_gone = True
