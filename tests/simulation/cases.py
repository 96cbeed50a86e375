"""Every core that the crash simulation and the replay tests run; a new core adds its case here."""

import random

from forgemq.bus.log import Emit
from forgemq.contracts import topics
from forgemq.contracts.groups import RetiredGroup, ScoredGroup
from forgemq.contracts.messages import Output
from forgemq.shell.records import emit_of
from tests.simulation.counting_core import CountingCore
from tests.simulation.harness import CoreCase
from tests.simulation.scheduling_cases import reward, scheduler


def counting() -> CoreCase:
    """Scored groups in a shuffled order, some retired before, some records unreadable."""
    rng = random.Random(7)
    script: list[Emit] = []
    for number in range(60):
        group_id = f"g-{rng.randrange(12):x}"
        if rng.random() < 0.1:
            script.append(
                Emit(topic=topics.SCORED_GROUPS.name, partition=0, key=b"?", value=b"\xc1 torn")
            )
        if rng.random() < 0.1:
            retired = RetiredGroup(
                group_id=group_id, domain="counting", purpose="train", reason="cancelled"
            )
            script.append(
                emit_of(Output(topic=topics.RETIRED_GROUPS.name, partition=0, record=retired))
            )
        scored = ScoredGroup(
            group_id=group_id,
            domain="counting",
            purpose="train",
            episodes=(),
            detail=str(number),
        )
        script.append(emit_of(Output(topic=topics.SCORED_GROUPS.name, partition=0, record=scored)))
    return CoreCase(
        name="counting",
        journal=topics.MERGER_JOURNAL,
        make_core=CountingCore,
        script=tuple(script),
    )


CASES = (counting, reward, scheduler)
