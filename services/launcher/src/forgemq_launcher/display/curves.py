"""Writes the curves of a run to `curves.jsonl`, a line for each step."""

from collections.abc import Mapping
from pathlib import Path

from forgemq_run_view.state import RunState, StepPoint
from forgemq_telemetry.curves import CurveFormat, Curves, read_curves

UNSETTLED_STEPS = 2
"""Groups admitted under version k are scored after step k has trained: so many of the newest steps
do not have the episodes of their version yet."""


class CurveWriter:
    """Appends each step once, also if the run is resumed.

    The line of step k has what the step measured; null is what it did not. Its `success` and
    `reward` are those of the training episodes in groups admitted under version k.

    The newest two steps are appended at the end of the run, whatever ended it. If it is resumed and
    more episodes of their versions end, they are appended again: the last line of a step counts.
    """

    def __init__(self, folder: Path, *, for_tensorboard: bool = False) -> None:
        others: tuple[CurveFormat, ...] = ("tensorboard",) if for_tensorboard else ()
        self._curves = Curves(folder, formats=("jsonl", *others))
        self._written = read_curves(folder)
        self._unsettled = set(list(self._written)[-UNSETTLED_STEPS:])

    def write(self, state: RunState, *, is_end: bool = False) -> None:
        """Append the new steps; those that are not settled only if this is the run's end.

        If a restarted trainer repeats a step in a new lineage, it is appended again.
        """
        tallies = {point.version: point.tally for point in state.versions}
        for point in state.points if is_end else state.points[:-UNSETTLED_STEPS]:
            tally = tallies.get(point.step)
            own = {"success": tally.success, "reward": tally.reward} if tally else {}
            if self._has(point, own):
                continue
            self._written[point.step] = {"lineage": point.lineage, **own}
            self._unsettled.discard(point.step)
            self._curves.write(
                point.step,
                {
                    "lineage": point.lineage,
                    "loss": point.loss,
                    "grad_norm": point.grad_norm,
                    "lr": point.lr,
                    "entropy": point.entropy,
                    "kl_k3": point.kl_k3,
                    "staleness_max": point.staleness_max,
                    "logprob_gap_mean": point.logprob_gap_mean,
                    "logprob_gap_p99": point.logprob_gap_p99,
                    "logprob_gap_max": point.logprob_gap_max,
                    "gap_entries": point.gap_entries,
                    "capped_share": point.capped_share,
                    "ratio_p99": point.ratio_p99,
                    "loss_tokens": point.loss_tokens,
                    "tree_tokens": point.tree_tokens,
                    "request_tokens": point.request_tokens,
                    "append_tokens": point.append_tokens,
                    "samples": point.samples,
                    "policy_age": point.policy_age,
                    **_of_some_runs(point),
                    **own,
                },
            )

    def _has(self, point: StepPoint, own: Mapping[str, float]) -> bool:
        """Whether the line that counts of this step needs no other one behind it."""
        written = self._written.get(point.step, {})
        if written.get("lineage") != point.lineage:
            return False
        if point.step not in self._unsettled:
            return True
        return all(written.get(name) == value for name, value in own.items())

    def close(self) -> None:
        """Close the file."""
        self._curves.close()


def _of_some_runs(point: StepPoint) -> dict[str, float]:
    """What only a step of a supervised domain, or of a run with a teacher, has."""
    values = {"nll_supervised": point.nll_supervised, "kl_teacher": point.kl_teacher}
    return {name: value for name, value in values.items() if value is not None}
