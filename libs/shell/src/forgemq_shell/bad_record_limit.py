"""Stops a task before it writes most of its input to the dead letter topic."""

from dataclasses import dataclass

from forgemq_bus.log import Place
from forgemq_shell.transform_settings import TransformSettings


class TooManyBadRecordsError(Exception):
    """So many records are bad that a producer or this service must be wrong."""


@dataclass(slots=True)
class _Seen:
    records: float = 0.0
    bad: float = 0.0
    bad_in_a_row: int = 0


class BadRecordLimit:
    """Counts good and bad records per partition; raises at too many bad ones."""

    def __init__(self, settings: TransformSettings) -> None:
        self._settings = settings
        self._seen: dict[Place, _Seen] = {}

    def count_good(self, place: Place) -> None:
        """Count a record that was handled; ends a row of bad ones."""
        seen = self._count(place)
        seen.bad_in_a_row = 0

    def count_bad(self, place: Place, reason: str) -> None:
        """Count a bad record.

        Raises:
            TooManyBadRecordsError: too many in a row, or too large a share of the recent records.
        """
        seen, limits = self._count(place), self._settings
        seen.bad += 1
        seen.bad_in_a_row += 1
        if seen.bad_in_a_row > limits.bad_consecutive_max:
            raise TooManyBadRecordsError(
                f"{place}: {seen.bad_in_a_row} bad records in a row, "
                f"at most {limits.bad_consecutive_max} are allowed "
                f"(FORGEMQ_TRANSFORM_BAD_CONSECUTIVE_MAX); the last one: {reason}"
            )
        if seen.records >= limits.bad_fraction_over_records and (
            seen.bad > limits.bad_fraction_max * seen.records
        ):
            raise TooManyBadRecordsError(
                f"{place}: {seen.bad:.0f} of the last {seen.records:.0f} "
                f"records are bad, at most {limits.bad_fraction_max:.0%} are allowed "
                f"(FORGEMQ_TRANSFORM_BAD_FRACTION_MAX); the last one: {reason}"
            )

    def _count(self, place: Place) -> _Seen:
        seen = self._seen.setdefault(place, _Seen())
        seen.records += 1
        if seen.records > 2 * self._settings.bad_fraction_over_records:
            # Halving both gives old records less weight without keeping a list of them.
            seen.records /= 2
            seen.bad /= 2
        return seen
