"""Whether a group is known at all: of a long log a wrong id is answered from its requests."""

from forgemq_contracts.topics import REQUESTED_GROUPS
from forgemq_launcher.records.shown_records import is_requested, shown_records
from tests.unit.launcher.test_follower import log_of
from tests.unit.run_view.synthetic import SyntheticRun, configuration


async def test_a_group_that_nobody_played_is_known_by_its_request_alone():
    run, made = SyntheticRun().play(steps=1), configuration()
    run.request("g-7")
    run.messages = list(run.of(REQUESTED_GROUPS))
    log = await log_of(run)
    assert await shown_records(log, "g-7", partitions=2) == []
    known = {
        each: await is_requested(log, each, configuration=made) for each in ("g-0", "g-7", "g-77")
    }
    assert known == {"g-0": True, "g-7": True, "g-77": False}
