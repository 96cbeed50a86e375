"""Writes the curves of a run to `curves.jsonl`, a line for each step."""

from pathlib import Path

from forgemq_run_view.state import RunState, StepPoint
from forgemq_telemetry.curves import CurveFormat, Curves, read_curves


class CurveWriter:
    """Appends each step once, also if the run is resumed.

    The line of step k has what the step measured; null is what it did not. Its `success` and
    `reward` are those of the training episodes in groups admitted under version k.
    """

    def __init__(self, folder: Path, *, for_tensorboard: bool = False) -> None:
        others: tuple[CurveFormat, ...] = ("tensorboard",) if for_tensorboard else ()
        self._curves = Curves(folder, formats=("jsonl", *others))
        self._written = {
            step: values.get("lineage", -1.0) for step, values in read_curves(folder).items()
        }

    def write(self, state: RunState) -> None:
        """Append the new steps except the newest two, which wait for their groups' scores.

        Groups admitted under version k are scored after step k has trained. If a step is written
        again (a restarted trainer repeats it in a new lineage), its last line counts.
        """
        tallies = {point.version: point.tally for point in state.versions}
        is_over = state.steps_trained >= state.steps
        for point in state.points if is_over else state.points[:-2]:
            if self._written.get(point.step) == point.lineage:
                continue
            self._written[point.step] = point.lineage
            tally = tallies.get(point.step)
            own = {"success": tally.success, "reward": tally.reward} if tally else {}
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

    def close(self) -> None:
        """Close the file."""
        self._curves.close()


def _of_some_runs(point: StepPoint) -> dict[str, float]:
    """What only a step of a supervised domain, or of a run with a teacher, has."""
    values = {"nll_supervised": point.nll_supervised, "kl_teacher": point.kl_teacher}
    return {name: value for name, value in values.items() if value is not None}
