"""Stops a task that would shovel its whole input into the dead letter topic."""

from dataclasses import dataclass

from forgemq_bus.log import Place
from forgemq_shell.transform_settings import TransformSettings


class TooManyBadRecordsError(Exception):
    """More bad records than an accident explains: a producer or this service is wrong."""


@dataclass(slots=True)
class _Seen:
    records: float = 0.0
    bad: float = 0.0
    bad_in_a_row: int = 0


class BadRecordLimit:
    """Counts per partition; a short burst passes, a flood does not."""

    def __init__(self, settings: TransformSettings) -> None:
        self._settings = settings
        self._seen: dict[Place, _Seen] = {}

    def good(self, place: Place) -> None:
        """A record of this partition was handled."""
        seen = self._counted(place)
        seen.bad_in_a_row = 0

    def bad(self, place: Place, reason: str) -> None:
        """A record of this partition was bad.

        Raises:
            TooManyBadRecordsError: too many in a row, or too large a share of the last records.
        """
        seen, limits = self._counted(place), self._settings
        seen.bad += 1
        seen.bad_in_a_row += 1
        if seen.bad_in_a_row > limits.bad_consecutive_max:
            raise TooManyBadRecordsError(
                f"{place.topic}/{place.partition}: {seen.bad_in_a_row} bad records in a row, "
                f"at most {limits.bad_consecutive_max} are allowed; the last one: {reason}"
            )
        if seen.records >= limits.bad_fraction_over_records and (
            seen.bad > limits.bad_fraction_max * seen.records
        ):
            raise TooManyBadRecordsError(
                f"{place.topic}/{place.partition}: {seen.bad:.0f} of the last {seen.records:.0f} "
                f"records are bad, at most {limits.bad_fraction_max:.0%} are allowed; "
                f"the last one: {reason}"
            )

    def _counted(self, place: Place) -> _Seen:
        seen = self._seen.setdefault(place, _Seen())
        seen.records += 1
        if seen.records > 2 * self._settings.bad_fraction_over_records:
            # Halving both forgets old records without keeping a list of them.
            seen.records /= 2
            seen.bad /= 2
        return seen
