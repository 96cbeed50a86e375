"""When the one group of all lanes is formed, and of whom."""

from forgemq_trainer.core.shared_members import AWAY_S, SETTLE_S, GroupMember, SharedMembers

A, B, C = GroupMember(0, 1, 1), GroupMember(1, 1, 2), GroupMember(2, 1, 1)
V1, V2 = (1, 1), (1, 2)


def test_a_group_is_formed_once_and_stays_while_its_members_do() -> None:
    members = SharedMembers()
    assert members.wanted([B, A], late=0, formed=(), newest=V1, at_s=0) == (A, B)
    assert members.wanted([A, B], late=0, formed=(A, B), newest=V1, at_s=1) == ()


def test_a_lane_that_comes_is_waited_for_and_then_in_a_new_group() -> None:
    members = SharedMembers()
    assert members.wanted([A, B], late=1, formed=(A, B), newest=V1, at_s=0) == ()
    assert members.wanted([A, B, C], late=0, formed=(A, B), newest=V1, at_s=3) == (A, B, C)


def test_members_that_load_a_version_one_after_another_keep_their_group() -> None:
    members = SharedMembers()
    for at_s, ready in enumerate([[], [A], [A, B]]):
        late = 2 - len(ready)
        assert members.wanted(ready, late=late, formed=(A, B), newest=V2, at_s=at_s) == ()


def test_a_late_lane_is_left_out_after_the_wait_and_each_version_has_a_wait_of_its_own() -> None:
    members = SharedMembers()
    assert members.wanted([A], late=1, formed=(A, B), newest=V1, at_s=0) == ()
    assert members.wanted([A], late=1, formed=(A, B), newest=V1, at_s=SETTLE_S) == (A,)
    later_s = SETTLE_S + 1
    assert members.wanted([A], late=2, formed=(), newest=V2, at_s=later_s) == ()
    assert members.wanted([A], late=2, formed=(), newest=V2, at_s=later_s + SETTLE_S) == (A,)


def test_a_lane_that_leaves_is_missed_at_once_and_nobody_is_no_group() -> None:
    members = SharedMembers()
    assert members.wanted([A, C], late=0, formed=(A, B, C), newest=V1, at_s=0) == (A, C)
    assert members.wanted([], late=0, formed=(A,), newest=V1, at_s=0) == ()


def test_an_engine_that_does_not_join_is_left_out_twice_as_long_each_time() -> None:
    members = SharedMembers()

    def wanted(at_s: float) -> tuple[GroupMember, ...]:
        return members.wanted([A, B], late=0, formed=(), newest=V1, at_s=at_s)

    members.note_absent([B], at_s=0)
    assert wanted(AWAY_S - 1) == (A,)
    assert wanted(AWAY_S) == (A, B)
    members.note_absent([B], at_s=AWAY_S)
    assert wanted(3 * AWAY_S - 1) == (A,)
    assert wanted(3 * AWAY_S) == (A, B)
    members.note_formed([A, B])
    members.note_absent([B], at_s=0)
    assert wanted(AWAY_S) == (A, B)


def test_a_lane_whose_engine_restarted_with_more_processes_is_another_member() -> None:
    members = SharedMembers()
    members.note_absent([B], at_s=0)
    restarted = B._replace(epoch=2)
    assert members.wanted([A, restarted], late=0, formed=(), newest=V1, at_s=1) == (A, restarted)
