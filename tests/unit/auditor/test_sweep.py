"""Which blobs are free: rules one by one, on values."""

from forgemq_auditor.core import LogMoment, Sweep

GRACE_S = 60.0


def moment(at_s: float, *, minute: str = "", first: int = 0) -> LogMoment[str]:
    """What a process saw; its minutes are named m0000, m0001 and so on."""
    return LogMoment(at_s=at_s, minute=minute or f"m{int(at_s // 60):04}", firsts={"p": first})


def after(*moments: LogMoment[str], offsets: tuple[int, ...] = ()) -> Sweep[str]:
    """A sweep that knows records at these offsets, which point at m0000/a."""
    sweep: Sweep[str] = Sweep(grace_s=GRACE_S)
    for offset in offsets:
        sweep.add_reference("m0000/a", partition="p", offset=offset)
    for each in moments:
        sweep.complete(each)
    return sweep


def test_a_blob_without_a_record_is_free_once_its_minute_was_over_for_the_grace():
    names = ["a", ".writing-x"]
    assert after(moment(70), moment(129.9)).free_blobs("m0000", names) == ()
    assert after(moment(59), moment(119)).free_blobs("m0000", names) == ()
    assert after(moment(70), moment(130)).free_blobs("m0000", names) == ("a", ".writing-x")


def test_a_process_that_has_just_started_frees_nothing_however_old_a_blob_is():
    assert after().free_blobs("m0000", ["a"]) == ()
    assert after(moment(9_000_000)).free_blobs("m0000", ["a"]) == ()


def test_a_clock_that_is_set_forward_does_not_make_a_blob_old():
    """The grace is measured by another clock than the one that names minutes."""
    assert after(moment(10), moment(20, minute="m9999")).free_blobs("m0000", ["a"]) == ()


def test_a_blob_stays_while_any_record_points_at_it():
    sweep = after(moment(70, first=5), moment(130, first=6), offsets=(3, 5))
    assert sweep.free_blobs("m0000", ["a", "b"]) == ("b",)


def test_a_blob_is_free_once_its_newest_record_was_trimmed_for_the_grace():
    sweep = after(moment(70, first=5), moment(130, first=6), offsets=(5, 3))
    sweep.complete(moment(189, first=6))
    assert sweep.free_blobs("m0000", ["a"]) == ()
    sweep.complete(moment(190, first=6))
    assert sweep.free_blobs("m0000", ["a"]) == ("a",)


def test_the_same_name_in_another_minute_is_another_blob():
    sweep = after(moment(200), moment(260), offsets=(3,))
    assert sweep.free_blobs("m0001", ["a"]) == ("a",)
    assert sweep.free_blobs("m0000", ["a"]) == ()
