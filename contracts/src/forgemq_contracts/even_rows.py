"""Whole numbers that follow fractions: fair schedules of several rates over equal steps.

Source: Pfair scheduling (Baruah, Cohen, Plaxton and Varvel, Algorithmica 15, 1996), by the
algorithm PD2 (Anderson and Srinivasan, Journal of Computer and System Sciences 68, 2004).
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import ceil, floor


def even_rows(rates: Sequence[Fraction]) -> Iterator[tuple[int, ...]]:
    """For each step, without end, a whole number for each rate.

    Every number is its rate rounded down or up. The numbers of a step sum to the sum of the rates,
    which is whole. After any n steps the sum of a rate's numbers differs from n * rate by less than
    1; so nothing is left over whenever n * rate is whole for all.

    Example: the rates 3/2, 3/2 and 1 give (2, 1, 1), (1, 2, 1), and so on.
    """
    wholes = [floor(rate) for rate in rates]
    rests = [rate - whole for rate, whole in zip(rates, wholes, strict=True)]
    places = sum(rests)
    assert places == int(places), "the rates must sum to a whole number"
    given = [0] * len(rates)
    step = 0
    while True:
        ready = [n for n, rest in enumerate(rests) if rest and floor(given[n] / rest) <= step]
        chosen = sorted(ready, key=lambda n: _urgency(rests[n], given[n] + 1))[: int(places)]
        for number in chosen:
            given[number] += 1
        yield tuple(whole + (n in chosen) for n, whole in enumerate(wholes))
        step += 1


def _urgency(rest: Fraction, number: int) -> tuple[int, int, int]:
    """Order of the next unit of a rate below 1: the smallest comes first (PD2's priority).

    By its last step; if those are equal, a unit whose window overlaps the next one's comes first,
    and of these the one whose chain of such windows is the longest.
    """
    last = ceil(number / rest)
    overlaps = last > number / rest
    chain = 0
    if overlaps and rest >= Fraction(1, 2):
        slack = 1 - rest
        chain = ceil(ceil(last * slack) / slack)
    return last, -overlaps, -chain
