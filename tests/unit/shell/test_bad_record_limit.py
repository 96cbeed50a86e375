import pytest

from forgemq_bus.log import Place
from forgemq_shell.bad_record_limit import BadRecordLimit, TooManyBadRecordsError
from forgemq_shell.transform_settings import TransformSettings

PLACE, OTHER = Place("scored-groups-v1", 0), Place("scored-groups-v1", 1)
SETTINGS = TransformSettings(
    bad_consecutive_max=3, bad_fraction_max=0.25, bad_fraction_over_records=20
)


def test_a_burst_up_to_the_limit_passes_and_one_more_stops_the_task():
    limit = BadRecordLimit(SETTINGS)
    for _ in range(3):
        limit.count_bad(PLACE, "torn")
    limit.count_bad(OTHER, "torn")
    with pytest.raises(
        TooManyBadRecordsError, match=r"4 bad records in a row.*BAD_CONSECUTIVE_MAX.*torn"
    ):
        limit.count_bad(PLACE, "torn")


def test_a_good_record_ends_the_row():
    limit = BadRecordLimit(SETTINGS)
    for _ in range(4):
        for _ in range(3):
            limit.count_bad(PLACE, "torn")
        limit.count_good(PLACE)


def feed(limit: BadRecordLimit, *, rounds: int, good: int) -> None:
    for _ in range(rounds):
        for _ in range(good):
            limit.count_good(PLACE)
        limit.count_bad(PLACE, "torn")


def test_a_lasting_share_above_the_limit_stops_the_task_and_one_below_does_not():
    feed(BadRecordLimit(SETTINGS), rounds=200, good=4)
    with pytest.raises(
        TooManyBadRecordsError, match=r"at most 25% are allowed .FORGEMQ_TRANSFORM_BAD_FRACTION_MAX"
    ):
        feed(BadRecordLimit(SETTINGS), rounds=200, good=2)


def test_old_records_are_forgotten():
    limit = BadRecordLimit(SETTINGS)
    for _ in range(5000):
        limit.count_good(PLACE)
    with pytest.raises(TooManyBadRecordsError):
        feed(limit, rounds=40, good=1)
