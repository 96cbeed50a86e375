"""What a storm in containers left of a run, and whether all of it is as it should be."""

import re
from collections.abc import Mapping

from msgspec import Struct

GUARANTEES = [f"G{number}" for number in range(1, 6)]


class Left(Struct, frozen=True, kw_only=True):
    """What a run left: containers are named pod/container.

    Attributes:
        audit: What `forgemq audit` printed.
        exits: Statuses after SIGTERM, or after the end of what ends by itself.
        failures: Why services ended that nobody stopped, in their own words.
    """

    audit_status: int
    audit: str
    exits: Mapping[str, int]
    failures: Mapping[str, tuple[str, ...]]


def defects(left: Left, *, steps: int, groups: int) -> list[str]:
    """What does not hold of a run that went to its end, with so many steps and groups in them."""
    found = [f"{name} ended with {status}" for name, status in left.exits.items() if status]
    verdicts = dict(re.findall(r"(G\d)\s+\S?\s*(held|DID NOT HOLD)", left.audit))
    found += [
        f"{each}: {verdicts.get(each, 'the audit does not name it')}"
        for each in GUARANTEES
        if verdicts.get(each) != "held"
    ]
    if left.audit_status:
        found.append(f"the audit ended with {left.audit_status}")
    for wanted in ("demo: completed", f"held: {steps} steps, {groups} groups"):
        if wanted not in left.audit:
            found.append(f"the audit does not say {wanted!r}")
    return found
