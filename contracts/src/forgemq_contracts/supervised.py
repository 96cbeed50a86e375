"""Supervised training: a domain whose groups are conversations that were finished elsewhere."""

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct


class Supervised(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The domain's imports train: each reply gets the loss -log p, whatever it earned.

    Its groups are single conversations, of the queue's task file or of `forgemq import`. An engine
    reads each reply in its context, so that the record has the policy's log-probabilities of it.
    """

    fraction: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Of the loss of an optimizer update that trains groups of this domain and "
            "others, whatever their numbers of tokens. The other domains have what is left.",
        ),
    ]


def loss_parts(domains: Sequence[str], fractions: Mapping[str, float]) -> list[float]:
    """The part that the loss of each group's kind has in one update; the kinds' parts sum to 1.

    A kind is one supervised domain, or all domains that are not supervised. A kind of which the
    update has no group leaves its part to those that are there, in proportion.

    Args:
        domains: Of the update's groups.
        fractions: Of the supervised domains; their sum is at most 1.

    Returns:
        One number for each group, above 0 unless the fractions add up to 1: that of its kind.
    """
    present = dict.fromkeys(domain if domain in fractions else "" for domain in domains)
    rest = 1 - sum(fractions.values())
    own = {kind: fractions[kind] if kind else rest for kind in present}
    total = sum(own.values())
    return [own[domain if domain in fractions else ""] / total for domain in domains]
