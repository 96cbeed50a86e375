"""Compares trees that no auditor has compared: for the report of a run and `forgemq audit`."""

from collections.abc import AsyncIterator

from forgemq_audit.group_index import COMPARED, ROUND_LIMITS, GroupIndex, RoundLimits
from forgemq_bus.log import Log, Place
from forgemq_contracts.accounting import RetiredIds
from forgemq_contracts.audit import TreeFacts
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.topics import needed_group

AUDITOR_NEEDED = needed_group("auditor")
"""Consumer group of the auditor's positions: what lies below them is audited."""


async def unaudited(
    log: Log, *, configuration: RunConfiguration, limits: RoundLimits = ROUND_LIMITS
) -> AsyncIterator[TreeFacts]:
    """Facts of the trees that no auditor has compared, and of some that one has.

    An auditor may work at the same time. If a group is on audited-groups once this has ended, use
    that record: the group's own records may have been trimmed while they were read here. This
    writes nothing, and holds the records of one round at a time.
    """
    for partition in range(configuration.log.group_partitions):
        places = [Place(topic.name, partition) for topic in COMPARED]
        starts = await log.first_positions(places)
        starts |= await log.committed(group=AUDITOR_NEEDED, places=places)
        index = GroupIndex(log, starts)
        await index.read_on(over=RetiredIds())
        waiting = index.merged()
        while waiting:
            taken = index.fitting(waiting, limits)
            groups = await index.records_of(taken)
            for group_id in taken:
                for facts in groups.pop(group_id).tree_facts(configuration):
                    yield facts
            waiting = waiting[len(taken) :]
