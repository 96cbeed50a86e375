"""Shows one run while it is up: the panel or plain lines, headlines, curves."""

import asyncio
import contextlib
from collections.abc import Callable

from forgemq_launcher.display.curves import CurveWriter
from forgemq_launcher.display.headlines import headlines
from forgemq_launcher.display.panel import PanelView
from forgemq_launcher.display.screen import Screen
from forgemq_run_view.state import RunState

SHOW_EVERY_S = 1.0
"""The engines' heartbeats come once a second; nothing on the panel changes much faster."""


class RunDisplay:
    """Shows a run on a screen and appends its curves.

    Args:
        screen: An open one shows the panel.
        curves: Grow by a line a step; closed at the end of `show`. None: nothing is written.
        state: The run as it is at this moment.
        panel_view: What the panel shows besides.
    """

    def __init__(
        self,
        screen: Screen,
        *,
        curves: CurveWriter | None,
        state: Callable[[], RunState],
        panel_view: Callable[[], PanelView],
    ) -> None:
        self._screen = screen
        self._curves = curves
        self._state = state
        self._panel_view = panel_view

    async def show(self) -> None:
        """Show the run once a second until cancelled, and once more at the end."""
        before: RunState | None = None
        try:
            while True:
                before = self._show_once(before)
                if self._curves is not None:
                    self._curves.write(before)
                await asyncio.sleep(SHOW_EVERY_S)
        finally:
            # The panel stays on the terminal: with the last round, and what Ctrl-C said.
            state = self._show_once(before)
            if self._curves is not None:
                with contextlib.closing(self._curves):
                    self._curves.write(state, is_end=True)

    def _show_once(self, before: RunState | None) -> RunState:
        state = self._state()
        for text in headlines(before, state):
            self._screen.say(text)
        self._screen.show(state, self._panel_view())
        return state
