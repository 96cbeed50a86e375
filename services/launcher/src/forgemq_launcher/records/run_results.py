"""What the last record of a run says of its report."""

from forgemq_contracts.fields import NamedValue
from forgemq_run_view.report import Report


def result_values(made: Report) -> tuple[NamedValue, ...]:
    """What the run's last record says of the report: success measured, guarantees as 0 or 1."""
    values = {
        "success_start": made.success_start,
        "success_end": made.success_end,
        "success_start_greedy": made.success_start_greedy,
        "success_end_greedy": made.success_end_greedy,
    }
    held = {name: float(holds) for name, holds in made.guarantees.items()}
    named = {name: value for name, value in (values | held).items() if value is not None}
    return tuple(NamedValue(name=name, value=value) for name, value in named.items())
