"""What a request for a group gets if its idempotency key was used before."""

import msgspec

from forgemq_contracts.admin import GroupStatus
from forgemq_contracts.asked_keys import KEYS_FULL_CODE, AskedKeys, number_of
from forgemq_contracts.groups import RequestedGroup
from forgemq_gateway.core.episodes import GroupFacts
from forgemq_gateway.core.errors import conflict, invalid
from forgemq_gateway.core.registry import Registry


def check_same(facts: GroupFacts, request: RequestedGroup) -> None:
    """Return if the request asks for this open group.

    Raises:
        RefusedError: 409, naming the field that differs.
    """
    differs = next(
        (
            name
            for name in ("purpose", "group_size", "temperature", "round_name", "source")
            if getattr(facts, name) != getattr(request, name)
        ),
        "" if _is_same_json(facts.task, request.task) else "task",
    )
    if differs:
        raise conflict(
            f"{differs}: the key {request.idempotency_key!r} asked for another group before, "
            f"{facts.group_id}, which is open",
            param=differs,
        )


def check_new(asked: AskedKeys, request: RequestedGroup) -> None:
    """Return if a new key of this kind can be remembered for the life of the run.

    Raises:
        RefusedError: 400, saying what the limit is and which keys have none.
    """
    reached = asked.limit_reached(request.idempotency_key, domain=request.domain)
    if reached:
        message = f"idempotency_key: {reached}"
        raise invalid(message, param="idempotency_key", code=KEYS_FULL_CODE)


def long_retired(request: RequestedGroup) -> GroupStatus:
    """The status of a group that retired so long ago that only its key is remembered."""
    return GroupStatus(
        group_id=request.group_id,
        state="retired",
        retire_reason="",
        group_size=0,
        queue_index=None,
        open=0,
        finished=0,
    )


def known_group(
    registry: Registry, request: RequestedGroup, *, takes_any: bool
) -> GroupStatus | None:
    """The group that the key of this request has asked for before, if it has.

    Raises:
        RefusedError: 409, it is open and differs, unless `takes_any`.
    """
    group = registry.groups.get(request.group_id)
    if group is not None and not takes_any:
        check_same(group.facts, request)
    known = registry.view(request.group_id)
    if known is None and registry.asked.has(request.idempotency_key, domain=request.domain):
        return long_retired(request)
    return known


def first_task(registry: Registry, *, domain: str) -> int:
    """The lowest n whose training group, with the key `<domain>/<n>`, is not over."""
    numbers = (
        number_of(group.facts.idempotency_key, source=domain)
        for group in registry.groups.values()
        if group.facts.domain == domain
    )
    unasked = registry.asked.first_unasked(domain, domain=domain)
    return min((unasked, *(number for number in numbers if number is not None)))


def _is_same_json(left: bytes, right: bytes) -> bool:
    """Whether both are the same value; with a number that is too large, the same bytes."""
    if left == right:
        return True
    try:
        return bool(msgspec.json.decode(left) == msgspec.json.decode(right))
    except (msgspec.DecodeError, RecursionError):
        return False
