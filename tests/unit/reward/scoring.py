"""Feeds a reward core and reads what it scored."""

from collections.abc import Sequence

import msgspec

from forgemq_contracts.groups import RetiredGroup, ScoredGroup
from forgemq_contracts.messages import Message
from forgemq_contracts.run import Rewards
from forgemq_reward.core import RewardCore

OUTCOME_ONLY = Rewards(alpha=1.0, beta=1.0)


def core_of(rewards: Rewards = OUTCOME_ONLY) -> RewardCore:
    return RewardCore(partition=3, rewards=rewards)


def feed(core: RewardCore, records: Sequence[msgspec.Struct]) -> list[ScoredGroup]:
    scored = []
    for record in records:
        message = Message(topic="", partition=0, offset=0, timestamp_ms=0, record=record)
        outputs = core.handle(message)
        core._check()
        assert all((o.topic, o.partition) == ("scored-groups-v1", 3) for o in outputs)
        for output in outputs:
            assert isinstance(output.record, ScoredGroup)
            scored.append(output.record)
    return scored


def score(episodes, grades, **rewards) -> ScoredGroup:
    [scored] = feed(core_of(Rewards(**{"beta": 1.0, **rewards})), [*episodes, *grades])
    return scored


def advantages(scored: ScoredGroup) -> list[tuple[int, int, float]]:
    return [(c.episode_index, c.sequence, round(c.advantage, 9)) for c in scored.completions]


def retired(group: str = "g-1") -> RetiredGroup:
    return RetiredGroup(group_id=group, domain="d", purpose="train", reason="cancelled")
