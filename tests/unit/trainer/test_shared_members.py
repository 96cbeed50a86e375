"""When the one group of all lanes is formed, and of whom."""

from forgemq_trainer.core.shared_members import AWAY_S, SETTLE_S, GroupMember, SharedMembers

A, B, C = GroupMember(0, 1, 1), GroupMember(1, 1, 2), GroupMember(2, 1, 1)


def test_a_group_is_formed_once_and_stays_while_its_members_do() -> None:
    members = SharedMembers()
    assert members.wanted([B, A], late=(), formed=(), at_s=0) == (A, B)
    assert members.wanted([A, B], late=(), formed=(A, B), at_s=1) == ()


def test_a_lane_that_comes_is_waited_for_and_then_in_a_new_group() -> None:
    members = SharedMembers()
    assert members.wanted([A, B], late=[2], formed=(A, B), at_s=0) == ()
    assert members.wanted([A, B, C], late=(), formed=(A, B), at_s=3) == (A, B, C)


def test_members_that_load_a_version_one_after_another_keep_their_group() -> None:
    members = SharedMembers()
    for at_s, ready in enumerate([[], [A], [A, B]]):
        late = {0, 1} - {each.lane for each in ready}
        assert members.wanted(ready, late=late, formed=(A, B), at_s=at_s) == ()


def test_a_late_lane_is_left_out_after_the_wait_and_another_one_has_a_wait_of_its_own() -> None:
    members = SharedMembers()
    assert members.wanted([A], late=[1], formed=(A, B), at_s=0) == ()
    assert members.wanted([A], late=[1], formed=(A, B), at_s=SETTLE_S) == (A,)
    later_s = SETTLE_S + 1
    assert members.wanted([A], late=[1, 2], formed=(), at_s=later_s) == ()
    assert members.wanted([A], late=[1, 2], formed=(), at_s=later_s + SETTLE_S) == (A,)


def test_a_lane_that_is_late_with_every_version_leaves_the_others_their_group() -> None:
    """Versions come faster than the wait for a late lane; A and B load each within a second."""
    members = SharedMembers()
    wanted = []
    for version in range(6):
        published_s = version * SETTLE_S / 2
        assert members.wanted([], late=[0, 1, 2], formed=(), at_s=published_s) == ()
        wanted.append(members.wanted([A, B], late=[2], formed=(), at_s=published_s + 1))
    assert wanted == [(), (), *[(A, B)] * 4]


def test_a_lane_that_leaves_is_missed_at_once_and_nobody_is_no_group() -> None:
    members = SharedMembers()
    assert members.wanted([A, C], late=(), formed=(A, B, C), at_s=0) == (A, C)
    assert members.wanted([], late=(), formed=(A,), at_s=0) == ()


def test_an_engine_that_does_not_join_is_left_out_twice_as_long_each_time() -> None:
    members = SharedMembers()

    def wanted(at_s: float) -> tuple[GroupMember, ...]:
        return members.wanted([A, B], late=(), formed=(), at_s=at_s)

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
    assert members.wanted([A, restarted], late=(), formed=(), at_s=1) == (A, restarted)
