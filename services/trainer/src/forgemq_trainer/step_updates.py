"""The optimizer updates of one step: gradients, update, and so on over minibatches and passes.

The behaviour log-probabilities stay those recorded at sampling. Nothing between two updates is
saved: a step that is cut short is trained again from the weights that it began with, by the same
minibatches in the same order, to the same bytes.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from forgemq_contracts.queues import supervised_fractions
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import ScheduledGroup
from forgemq_trainer.core.loss import LossFunction
from forgemq_trainer.core.loss_weights import mixed_loss_weights
from forgemq_trainer.core.metrics import DraftMeasures, of_all_updates
from forgemq_trainer.core.minibatches import minibatches
from forgemq_trainer.core.optimizer import NonFiniteGradientError
from forgemq_trainer.core.step import EntryValues, Objective, merged
from forgemq_trainer.core.tree import Floats, Forest


class AppliesGradients(Protocol):
    """The optimizer, as a step uses it."""

    def update(self, *, lr: float) -> float:
        """Apply and drop the gradients; returns their norm before clipping."""
        ...


class TrainsHead(Protocol):
    """A draft head, as a step uses it."""

    def update(self) -> DraftMeasures | None:
        """Apply and drop the gradients of an update; None if no row ran."""
        ...


class TrainedModel(Protocol):
    """The model, as a step uses it; of several ranks each makes the same calls."""

    @property
    def updater(self) -> AppliesGradients:
        """Its optimizer."""
        ...

    @property
    def head(self) -> TrainsHead | None:
        """Its draft head; None if the run trains none."""
        ...

    def with_references(self, forests: tuple[Forest, ...]) -> tuple[Forest, ...]:
        """The forests with the reference's log-probabilities, if the run has a reference."""
        ...

    def read_forests(self, forests: Sequence[Forest]) -> list[Floats]:
        """Log-probability of each entry of each forest, nats; changes no gradient."""
        ...

    def forward_backward(self, objective: Objective) -> EntryValues:
        """Add the objective's gradients; returns the values of its entries."""
        ...

    @property
    def idle_share(self) -> float:
        """Of the plan of the newest `forward_backward`, 0..1."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenUpdates:
    """What the updates of a step did.

    Attributes:
        values: Of all updates, one after the other; `loss` is the updates' mean, and
            `route_disagreements` counts each entry once.
        grad_norms: Before clipping, of the updates that changed the weights.
        skipped: Updates without a finite gradient.
        compute_s: Time of all forwards and backwards.
        idle_share: Of their plans, mean.
        draft: Of the draft head, which takes as many updates; None without one.
    """

    values: EntryValues
    grad_norms: tuple[float, ...]
    skipped: int
    compute_s: float
    idle_share: float
    draft: DraftMeasures | None = None

    @property
    def grad_norm(self) -> float:
        """Mean over the updates that changed the weights; 0 if none did."""
        return sum(self.grad_norms) / max(1, len(self.grad_norms))


class StepUpdates:
    """The updates of one step. `begin` changes no weight; `take` is called once after it.

    Example: 8 groups, 2 minibatches and 3 passes are 6 updates. `begin` has computed the first
    one's gradients; `take` applies them, and computes and applies the other five.
    """

    def __init__(
        self,
        model: TrainedModel,
        configuration: RunConfiguration,
        *,
        groups: Sequence[ScheduledGroup],
        forests: Sequence[Forest],
        loss: LossFunction,
    ) -> None:
        """Compute nothing yet; there is a forest for each group."""
        self._model = model
        self._settings = configuration.loss
        self._passes = configuration.updates.passes
        self._minibatches = minibatches(groups, count=configuration.updates.minibatches)
        self._forests = tuple(forests)
        self._domains = [group.domain for group in groups]
        self._fractions = supervised_fractions(configuration)
        self._loss = loss
        self._parts: list[EntryValues] = []
        self._grad_norms: list[float] = []
        self._skipped = 0
        self._compute_s = 0.0
        self._idle_shares: list[float] = []
        self._drafts: list[DraftMeasures] = []

    def begin(self) -> EntryValues:
        """Compute the gradients of the first update; returns the values of its entries.

        What does not depend on the updates is computed once, before them: the log-probabilities of
        the reference, and those of the policy at the step's beginning.
        """
        started_s = time.perf_counter()
        self._forests = self._model.with_references(self._forests)
        # The one update of a step has no other policy than that at its beginning.
        if self._settings.anchor == "step_start" and self._passes * len(self._minibatches) > 1:
            read = self._model.read_forests(self._forests)
            self._forests = tuple(
                replace(forest, entry_start_E=start_E)
                for forest, start_E in zip(self._forests, read, strict=True)
            )
        self._compute_s += time.perf_counter() - started_s
        if not self._minibatches:
            return merged([])
        return self._compute(self._minibatches[0])

    def take(self, *, lr: float) -> TakenUpdates:
        """Apply the first update's gradients, then compute and apply those of all others."""
        for number in range(self._passes * len(self._minibatches)):
            minibatch = self._minibatches[number % len(self._minibatches)]
            if number:
                self._compute(minibatch)
            # Without entries nothing has a gradient, so there is no norm to clip by.
            if any(self._forests[group].entry_count for group in minibatch):
                self._update(lr=lr)
            if self._model.head is not None and (draft := self._model.head.update()):
                self._drafts.append(draft)
        values = merged(self._parts)
        return TakenUpdates(
            values=replace(
                values,
                loss=values.loss / max(1, len(self._parts)),
                route_disagreements=values.route_disagreements // self._passes,
            ),
            grad_norms=tuple(self._grad_norms),
            skipped=self._skipped,
            compute_s=self._compute_s,
            idle_share=sum(self._idle_shares) / max(1, len(self._idle_shares)),
            draft=of_all_updates(self._drafts),
        )

    def _compute(self, minibatch: Sequence[int]) -> EntryValues:
        started_s = time.perf_counter()
        forests = [self._forests[group] for group in minibatch]
        values = self._model.forward_backward(
            Objective(
                forests=forests,
                loss_weights=mixed_loss_weights(
                    forests,
                    domains=[self._domains[group] for group in minibatch],
                    fractions=self._fractions,
                    loss=self._settings,
                ),
                loss=self._loss,
            )
        )
        self._compute_s += time.perf_counter() - started_s
        self._parts.append(values)
        self._idle_shares.append(self._model.idle_share)
        return values

    def _update(self, *, lr: float) -> None:
        try:
            self._grad_norms.append(self._model.updater.update(lr=lr))
        except NonFiniteGradientError:
            self._skipped += 1
