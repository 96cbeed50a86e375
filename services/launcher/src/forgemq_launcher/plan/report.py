"""The plan of a run with what follows from it: what `forgemq plan --json` prints."""

from msgspec import Struct

from forgemq_launcher.plan.machines import Machines
from forgemq_launcher.plan.run_plan import RunPlan


class PlanReport(Struct, frozen=True, kw_only=True):
    """Whether a run fits, why not, and all numbers.

    Attributes:
        fits: Whether nothing speaks against it.
        reasons: What does not fit.
        notes: What the numbers do not say.
        machines: That it is planned for.
        config: File that the model's sizes are from.
        plan: All numbers.
    """

    fits: bool
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    machines: Machines
    config: str
    plan: RunPlan
