"""The table of forks by reason, as the closing table and `forgemq inspect` show it."""

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.table import Column, Table

from forgemq_run_view.state import ForkTotal


def fork_table(forks: Sequence[ForkTotal]) -> Table | str:
    """One row for each reason; `none` if no request forked."""
    if not forks:
        return "none"
    shown = Table(
        Column("reason", no_wrap=True),
        Column("forks", justify="right"),
        Column("of episodes", justify="right"),
        "meaning",
        box=SIMPLE,
        padding=(0, 1),
        show_edge=False,
    )
    for each in forks:
        shown.add_row(each.reason, f"{each.forks:,}", f"{each.episodes_share:.1%}", each.meaning)
    return shown
