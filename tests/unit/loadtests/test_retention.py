"""The run of the load test goes through every service to the audit."""

from retention_outside import Workload
from retention_run import retained

from forgemq_contracts import topics

TINY = Workload(
    groups=4,
    slots=2,
    groups_per_step=2,
    rollouts=2,
    turns=2,
    prompt=10,
    act=4,
    observe=5,
    task=20,
)


async def test_every_group_is_played_trained_and_audited_and_each_byte_is_counted_once(tmp_path):
    run = await retained(TINY, groups=TINY.groups, folder=str(tmp_path))
    assert run.completions == 16
    kept = {t.name: n for t in topics.OF_RUN if (n := run.written_by_topic[t.name])}
    assert sum(kept.values()) == run.written_bytes
    trimmed = {topic.name for topic in topics.OF_RUN if topic.needed_by}
    assert sum(n for name, n in kept.items() if name not in trimmed) == run.kept_bytes
    silent = {
        topics.CLOSED_GROUPS.name,
        topics.CANCELLED_COMPLETIONS.name,
        topics.SAMPLED_CHUNKS.name,
        topics.OFFERED_BROADCASTS.name,
        topics.REQUESTED_ENDS.name,
        topics.REQUESTED_LANES.name,
    }
    assert {topic.name for topic in topics.OF_RUN} - set(kept) == silent
