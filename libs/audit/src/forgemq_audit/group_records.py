"""The records of one group, and the AuditedGroup made of them."""

import hashlib
from dataclasses import dataclass, field

from forgemq_audit.tree_facts import first_ends, tree_facts
from forgemq_bus.log import Record
from forgemq_contracts.accounting import is_candidate
from forgemq_contracts.audit import AuditedGroup, TreeFacts
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.episodes import FinishedEpisode
from forgemq_contracts.groups import ScoredGroup
from forgemq_contracts.messages import Message
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.trees import MergedTree
from forgemq_run_view.trajectory import chosen


@dataclass(slots=True)
class GroupRecords:
    """The records of one group in the order they were read."""

    completions: list[Message] = field(default_factory=list)
    ends: list[Message] = field(default_factory=list)
    scored: ScoredGroup | None = None
    trees: list[tuple[MergedTree, str]] = field(default_factory=list)

    def add(self, message: Message, record: Record) -> None:
        """Take in one decoded record, and the record it came from."""
        match message.record:
            case FinishedCompletion():
                self.completions.append(message)
            case FinishedEpisode():
                self.ends.append(message)
            case ScoredGroup() as scored:
                self.scored = scored
            case MergedTree() as tree:
                self.trees.append((tree, hashlib.sha256(record.value).hexdigest()))

    def tree_facts(self, configuration: RunConfiguration) -> tuple[TreeFacts, ...]:
        """What comparing each tree with completions, scores and manifests shows."""
        completions, ends = chosen(self.completions), first_ends(self.ends)
        return tuple(
            tree_facts(
                tree,
                sha256=sha256,
                completions=completions,
                scored=self.scored,
                ends=ends,
                configuration=configuration,
            )
            for tree, sha256 in self.trees
        )

    def audited(self, group_id: str, configuration: RunConfiguration) -> AuditedGroup:
        """What is kept for the run's life once these records are trimmed."""
        sampled = [
            message.record
            for message in self.completions
            if isinstance(message.record, FinishedCompletion) and is_candidate(message.record)
        ]
        versions = [span.version for completion in sampled for span in completion.spans]
        return AuditedGroup(
            group_id=group_id,
            completions=len(sampled),
            output_tokens=sum(len(completion.output) // 4 for completion in sampled),
            version_min=min(versions, default=None),
            version_max=max(versions, default=None),
            trees=self.tree_facts(configuration),
        )
