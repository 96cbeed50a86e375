"""What `forgemq eval` shows: a table for each domain."""

from collections.abc import Sequence

from rich.table import Table

from forgemq_launcher.records.evaluation import DomainEvaluation


def evaluation_tables(found: Sequence[DomainEvaluation]) -> list[Table]:
    """One table for each domain: pass@k with its interval."""
    return [_table(each) for each in found]


def _table(found: DomainEvaluation) -> Table:
    masked = f", {found.episodes_masked:,} masked" if found.episodes_masked else ""
    shown = Table(
        title=f"{found.domain}: {len(found.tasks):,} tasks, {found.episodes:,} episodes{masked}, "
        f"T={found.temperature:g}",
        title_justify="left",
    )
    for name in ("k", "pass@k", f"{found.confidence:.0%} interval (Wilson)", "tasks"):
        shown.add_column(name, justify="right", no_wrap=True)
    for rate in found.pass_at_k:
        interval = f"{rate.low:.3f} - {rate.high:.3f}"
        shown.add_row(str(rate.k), f"{rate.rate:.3f}", interval, str(rate.tasks))
    return shown
