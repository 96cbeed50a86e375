"""Whether guarantees G1 to G5 (README.md) held, from the log alone.

What is not on the log cannot be checked. A verdict calls it `unknown` and does not hold: a
guarantee counts as kept only if everything it speaks of was compared.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from forgemq_audit.held_trees import HeldTree, held, repeated_completions
from forgemq_audit.same_logprobs import gap_text, gap_violations, limits_of
from forgemq_contracts.audit import AuditedGroup, TreeFacts
from forgemq_contracts.groups import AdmittedGroup, RetiredGroup
from forgemq_contracts.messages import Message
from forgemq_contracts.mixture import staleness_limits
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import ScheduledStep, TrainedStep
from forgemq_contracts.topics import (
    ADMITTED_GROUPS,
    AUDITED_GROUPS,
    RETIRED_GROUPS,
    SCHEDULED_STEPS,
    TRAINED_STEPS,
    Topic,
)
from forgemq_run_view.report import Guarantee, GuaranteeVerdict
from forgemq_run_view.steps import surviving

TOPICS: tuple[Topic, ...] = (
    ADMITTED_GROUPS,
    RETIRED_GROUPS,
    AUDITED_GROUPS,
    SCHEDULED_STEPS,
    TRAINED_STEPS,
)

VIOLATIONS_KEPT_MAX = 20
"""Enough to see what kind of fault it is; a broken run has thousands."""


class Ledger:
    """The accounting records of one run.

    Lifecycle: `apply` every accounting record, `add_tree` the facts of trees that are not audited,
    then ask for `verdicts`. The order does not matter, and a record read twice changes nothing.
    """

    def __init__(self, configuration: RunConfiguration) -> None:
        self._configuration = configuration
        self._admitted: dict[str, list[tuple[int, int]]] = {}
        self._admissions: dict[str, AdmittedGroup] = {}
        self._retired: dict[str, dict[tuple[int, int], RetiredGroup]] = {}
        self._scheduled: dict[int, dict[int, ScheduledStep]] = {}
        self._trained: dict[int, TrainedStep] = {}  # by offset
        self._trees: dict[str, list[HeldTree]] = {}
        self._audited: set[str] = set()

    def apply(self, message: Message) -> None:
        """Take in one record; records of other kinds are ignored."""
        at = (message.partition, message.offset)
        match message.record:
            case AdmittedGroup() as record:
                admissions = self._admitted.setdefault(record.group_id, [])
                if at not in admissions:
                    admissions.append(at)
                self._admissions[record.group_id] = record
            case RetiredGroup() as record:
                self._retired.setdefault(record.group_id, {})[at] = record
            case ScheduledStep() as record:
                self._scheduled.setdefault(record.step, {})[message.offset] = record
            case TrainedStep() as record:
                self._trained[message.offset] = record
            case AuditedGroup() as record:
                self._audited.add(record.group_id)
                for facts in record.trees:
                    self.add_tree(facts)
            case _:
                pass

    def is_audited(self, group_id: str) -> bool:
        """Whether the group was compared after it retired; its records may then be trimmed."""
        return group_id in self._audited

    def add_tree(self, facts: TreeFacts) -> None:
        """Take in the facts of one tree."""
        tree, trees = held(facts), self._trees.setdefault(facts.group_id, [])
        if tree not in trees:
            trees.append(tree)

    def trained_group_ids(self) -> tuple[str, ...]:
        """Groups that the surviving weights were trained on, in training order."""
        kept = self._surviving().values()
        return tuple(group_id for step in kept for group_id in step.group_ids)

    def trained_trees(self) -> tuple[HeldTree, ...]:
        """Trees of the trained groups, as far as they were compared."""
        return tuple(
            tree for group_id in self.trained_group_ids() for tree in self._trees.get(group_id, ())
        )

    def verdicts(
        self, *, is_ended: bool, is_audit_behind: bool = False
    ) -> tuple[GuaranteeVerdict, ...]:
        """G1 to G5.

        Args:
            is_ended: Nothing may be open, or scheduled and not trained.
            is_audit_behind: An auditor still compares groups: those it has not come to are left
                out, and do not count as unknown.
        """
        missing = self._missing_trees(is_audit_behind=is_audit_behind)
        return (
            self._retired_once(is_ended=is_ended),
            self._trained_once(is_ended=is_ended, missing=missing),
            self._fresh(missing),
            self._as_sampled(missing),
            self._same_logprobs(),
        )

    def _surviving(self) -> dict[int, TrainedStep]:
        return surviving(self._trained.values())

    def _retired_once(self, *, is_ended: bool) -> GuaranteeVerdict:
        # A restarted trainer may still have to train steps again whose groups have retired.
        steps = self._surviving().values() if is_ended else self._trained.values()
        trained_in = {group_id: {step.step} for step in steps for group_id in step.group_ids}
        wrong = [
            f"{group_id} was admitted {len(admissions)} times"
            for group_id, admissions in self._admitted.items()
            if len(admissions) > 1
        ]
        wrong += _gaps(self._admissions.values())
        for group_id, records in self._retired.items():
            if len(records) > 1:
                reasons = [record.reason for record in records.values()]
                wrong.append(f"{group_id} was retired {len(records)} times: {reasons}")
            if group_id not in self._admitted and not _is_refused(records.values()):
                wrong.append(f"{group_id} was retired and never admitted")
            called = {r.step for r in records.values() if r.reason == "trained"}
            if called != trained_in.get(group_id, set()) and (is_ended or called):
                wrong.append(f"{group_id}: trained and retired as trained disagree")
        still_open = [group_id for group_id in self._admitted if group_id not in self._retired]
        if is_ended:
            wrong += [f"{group_id} was never retired" for group_id in still_open]
        retired = len(self._admitted) - len(still_open)
        never_admitted = len(self._retired) - retired
        refused = f"; {never_admitted} ended without a slot" if never_admitted else ""
        return _verdict(
            "G1",
            wrong,
            checked=f"{len(self._admitted)} groups admitted, {retired} retired, "
            f"{len(still_open)} open{refused}",
        )

    def _trained_once(self, *, is_ended: bool, missing: Sequence[str]) -> GuaranteeVerdict:
        kept = self._surviving()
        wrong = []
        if list(kept) != list(range(len(kept))):
            wrong.append(f"trained steps are not gap-free from 0: {list(kept)}")
        wrong += _disorder(self._trained)
        for step in self._trained.values():
            wrong += self._against_schedule(step)
        for step_number, versions in self._scheduled.items():
            if len(versions) > 1:
                wrong.append(f"step {step_number} was scheduled {len(versions)} times")
            if is_ended and step_number not in kept:
                wrong.append(f"step {step_number} was scheduled and never trained")
        groups = Counter(self.trained_group_ids())
        wrong += [f"{g} was trained {n} times" for g, n in groups.items() if n > 1]
        trees = self.trained_trees()
        repeated = repeated_completions(trees)
        wrong += [f"completion {c} was trained {n} times" for c, n in repeated.items()]
        for tree in trees:
            wrong += tree.facts.lost
            wrong += _unknown(tree.facts.unknown)
        wrong += missing
        samples = sum(tree.samples for tree in trees) - sum(n - 1 for n in repeated.values())
        return _verdict(
            "G2",
            wrong,
            checked=f"{len(kept)} steps, {len(groups)} groups, {samples} samples",
        )

    def _against_schedule(self, step: TrainedStep) -> list[str]:
        scheduled = self._scheduled.get(step.step)
        if not scheduled:
            return [f"step {step.step} was trained and never scheduled"]
        planned = [group.group_id for group in next(iter(scheduled.values())).groups]
        done = Counter(step.group_ids) + Counter(step.failed_group_ids)
        if done != Counter(planned):
            lost = sorted(set(planned) - set(done))
            return [f"step {step.step}: groups differ from its schedule, lost {lost}"]
        return []

    def _fresh(self, missing: Sequence[str]) -> GuaranteeVerdict:
        limits = staleness_limits(self._configuration)
        wrong = []
        stalest = 0
        groups = 0
        for step, records in sorted(self._scheduled.items()):
            for group in next(iter(records.values())).groups:
                groups += 1
                stalest = max(stalest, group.staleness)
                if group.staleness != step - group.version_min:
                    wrong.append(f"{group.group_id}: staleness is not step - oldest version")
                if group.staleness > limits[group.domain]:
                    wrong.append(
                        f"{group.group_id}: {group.staleness} steps stale in step {step}, "
                        f"limit {limits[group.domain]}"
                    )
                wrong += [
                    f"{group.group_id}: oldest version in the tree is {facts.version_min}, "
                    f"scheduled as {group.version_min}"
                    for facts in (tree.facts for tree in self._trees.get(group.group_id, ()))
                    if facts.sha256 == group.tree_sha256 and facts.version_min != group.version_min
                ]
        wrong += missing
        return _verdict("G3", wrong, checked=f"{groups} groups scheduled, stalest {stalest} steps")

    def _as_sampled(self, missing: Sequence[str]) -> GuaranteeVerdict:
        wrong = list(missing)
        samples = 0
        planned = {
            group.group_id: group.tree_sha256
            for records in self._scheduled.values()
            for group in next(iter(records.values())).groups
        }
        for group_id in self.trained_group_ids():
            compared, sha256 = self._trees.get(group_id, ()), planned.get(group_id)
            trees = [tree for tree in compared if tree.facts.sha256 == sha256]
            if compared and not trees:
                wrong.append(f"{group_id}: no tree has the scheduled checksum")
            for tree in trees:
                samples += tree.samples
                wrong += tree.facts.differences
        return _verdict("G4", wrong, checked=f"{samples} samples against the log")

    def _missing_trees(self, *, is_audit_behind: bool) -> list[str]:
        """Trained groups whose tree was not compared."""
        return _unknown(
            f"the tree of {group_id} is not on the log"
            for group_id in self.trained_group_ids()
            if group_id not in self._trees and (group_id in self._audited or not is_audit_behind)
        )

    def _same_logprobs(self) -> GuaranteeVerdict:
        limits = limits_of(self._configuration)
        steps = tuple(self._surviving().values())
        wrong = gap_violations(steps, limits) if steps else []
        return _verdict("G5", wrong, checked=gap_text(steps, limits))


def _is_refused(records: Iterable[RetiredGroup]) -> bool:
    """Whether the group failed before its admission because its request did not decode."""
    return all(each.reason == "failed" and each.queue_index is None for each in records)


def _disorder(trained: Mapping[int, TrainedStep]) -> list[str]:
    """Steps that do not follow the one before them in their lineage, by offset of their record."""
    wrong = []
    newest: dict[int, int] = {}
    for _, record in sorted(trained.items()):
        before = newest.get(record.lineage, record.step - 1)
        if record.step != before + 1:
            wrong.append(f"lineage {record.lineage}: step {record.step} follows step {before}")
        newest[record.lineage] = record.step
    return wrong


def _unknown(texts: Iterable[str]) -> list[str]:
    return [f"unknown: {text}" for text in texts]


def _gaps(admissions: Iterable[AdmittedGroup]) -> list[str]:
    by_domain: dict[str, list[int]] = {}
    for record in admissions:
        if record.queue_index is not None:
            by_domain.setdefault(record.domain, []).append(record.queue_index)
    return [
        f"queue {domain}: indices are not gap-free from 0"
        for domain, indices in by_domain.items()
        if sorted(indices) != list(range(len(indices)))
    ]


def _verdict(name: Guarantee, wrong: Sequence[str], *, checked: str) -> GuaranteeVerdict:
    more = len(wrong) - VIOLATIONS_KEPT_MAX
    kept = tuple(wrong[:VIOLATIONS_KEPT_MAX]) + ((f"and {more} more",) if more > 0 else ())
    return GuaranteeVerdict(name=name, holds=not wrong, checked=checked, violations=kept)
