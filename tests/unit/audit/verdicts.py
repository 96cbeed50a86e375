"""The verdicts on the records of a run."""

import hashlib
from collections.abc import Sequence

from forgemq_audit.guarantees import Ledger
from forgemq_audit.tree_facts import first_ends, tree_facts
from forgemq_contracts import topics
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.episodes import FinishedEpisode
from forgemq_contracts.groups import ScoredGroup
from forgemq_contracts.messages import Message
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.trees import MergedTree
from forgemq_run_view.report import GuaranteeVerdict
from forgemq_run_view.trajectory import chosen
from tests.unit.run_view.synthetic import configuration

CONFIGURATION = configuration()


def audited(
    messages: Sequence[Message],
    *,
    is_ended: bool = True,
    of: RunConfiguration = CONFIGURATION,
) -> dict[str, GuaranteeVerdict]:
    ledger = Ledger(of)
    completions: dict[str, list[Message]] = {}
    scored: dict[str, ScoredGroup] = {}
    ends: dict[str, list[Message]] = {}
    for message in messages:
        ledger.apply(message)
        if isinstance(message.record, FinishedEpisode):
            ends.setdefault(message.record.group_id, []).append(message)
        if isinstance(message.record, FinishedCompletion):
            completions.setdefault(message.record.group_id, []).append(message)
        if isinstance(message.record, ScoredGroup):
            scored[message.record.group_id] = message.record
    for message in messages:
        tree = message.record
        if isinstance(tree, MergedTree):
            ledger.add_tree(
                tree_facts(
                    tree,
                    sha256=hashlib.sha256(topics.encode(tree)).hexdigest(),
                    completions=chosen(completions.get(tree.group_id, ())),
                    scored=scored.get(tree.group_id),
                    ends=first_ends(ends.get(tree.group_id, ())),
                    configuration=of,
                )
            )
    return {verdict.name: verdict for verdict in ledger.verdicts(is_ended=is_ended)}


def broken(verdicts: dict[str, GuaranteeVerdict]) -> set[str]:
    return {name for name, verdict in verdicts.items() if not verdict.holds}
