"""What the process that shows a run holds of it, however long the run is."""

from forgemq_contracts.audit import AuditedGroup, TreeFacts
from forgemq_contracts.topics import AUDITED_GROUPS
from forgemq_launcher.records.follower import Follower
from tests.held_objects import held_objects
from tests.unit.launcher.test_follower import log_of
from tests.unit.run_view.synthetic import SyntheticRun, started


async def followed(*, samples: int) -> Follower:
    """Of a run with some groups, each of which was audited and has so many samples."""
    run = SyntheticRun()
    for number in range(10):
        group_id = f"g-{number}"
        facts = TreeFacts(
            group_id=group_id,
            sha256="0" * 64,
            completion_ids=tuple(f"{number:016x}{sample:016x}" for sample in range(samples)),
            entries=samples,
        )
        audited = AuditedGroup(group_id=group_id, completions=samples, trees=(facts,))
        run.put(AUDITED_GROUPS, audited, partition=run.partition(group_id))
    follower = Follower(await log_of(run), started())
    await follower.catch_up()
    assert len(follower.view.rows(rows_max=20)) == 10
    return follower


async def test_a_run_that_is_shown_is_held_without_its_samples():
    few, many = await followed(samples=1), await followed(samples=400)
    assert held_objects(many) < held_objects(few) + 400
