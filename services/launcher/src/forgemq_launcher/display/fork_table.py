"""The table of forks by reason, as the closing table and `forgemq inspect` show it."""

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.table import Column, Table

from forgemq_run_view.state import ForkTotal


def fork_table(forks: Sequence[ForkTotal]) -> Table:
    """One row for each reason; they are readable in 80 columns."""
    shown = Table(
        Column("reason", no_wrap=True),
        Column("forks", justify="right"),
        Column("of episodes", justify="right"),
        "meaning",
        title="forks: requests that did not extend what their episode had recorded",
        title_justify="left",
        box=SIMPLE,
        show_edge=False,
    )
    for each in forks:
        shown.add_row(each.reason, f"{each.forks:,}", f"{each.episodes_share:.1%}", each.meaning)
    return shown
