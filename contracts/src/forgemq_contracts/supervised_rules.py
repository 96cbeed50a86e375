"""What a run with supervised domains must and must not have."""

from collections.abc import Container, Sequence

from forgemq_contracts.lane_engines import is_paired
from forgemq_contracts.loss import Loss
from forgemq_contracts.queues import supervised_fractions
from forgemq_contracts.run import Queue, RunConfiguration
from forgemq_contracts.stages import Stage

_OF_AGENTS = (
    *("agent", "task_source", "held_out_file", "task_split", "held_out_split"),
    *("outcome", "process", "speed", "curriculum", "sampling"),
)
"""Fields of a queue whose episodes are sampled, compared and graded."""

_LOSS_DIVISORS = ("normalisation", "group_tokens")
"""Fields of a loss that hold for given replies too."""


def check_supervised(configuration: RunConfiguration) -> None:
    """Refuse supervised domains that cannot train as their run says.

    Raises:
        ValueError: Names the field and the rule.
    """
    fractions = supervised_fractions(configuration)
    if not fractions:
        return
    for queue in configuration.queues:
        if queue.supervised is not None:
            _check_queue(queue)
    _check_stages(configuration.stages, supervised=fractions)
    total, has_others = sum(fractions.values()), len(fractions) < len(configuration.queues)
    if total > 1 or (total == 1 and has_others):
        bound = "below 1, since other domains train too" if has_others else "at most 1"
        raise ValueError(
            f"queues.*.supervised.fraction: all of them together must be {bound}, got {total:g}"
        )
    if not has_others:
        _check_loss(configuration.loss)
    _check_beside(configuration)


def _check_queue(queue: Queue) -> None:
    name = f"queues.{queue.domain}"
    if queue.group_size != 1:
        raise ValueError(
            f"{name}.group_size must be 1 in a supervised domain: a conversation is compared with "
            f"no other, got {queue.group_size}"
        )
    for field in _OF_AGENTS:
        if getattr(queue, field):
            raise ValueError(
                f"{name}.{field} must be left out in a supervised domain: its conversations are "
                f"finished, got {getattr(queue, field)!r}"
            )


def _check_stages(stages: Sequence[Stage], *, supervised: Container[str]) -> None:
    for index, stage in enumerate(stages):
        for own in stage.domains:
            if own.domain in supervised and own.sampling is not None:
                raise ValueError(
                    f"stages.{index}.domains.{own.domain}.sampling must be left out: the domain "
                    "is supervised, and its conversations are finished"
                )


def _check_loss(loss: Loss) -> None:
    """Refuse what only sampled tokens have, if none are."""
    usual = Loss()
    for field in Loss.__struct_fields__:
        given = getattr(loss, field)
        if field not in _LOSS_DIVISORS and given != getattr(usual, field):
            raise ValueError(
                f"loss.{field} must be left out if all domains are supervised: the loss of their "
                f"tokens is -log p, got {given!r}"
            )


def _check_beside(configuration: RunConfiguration) -> None:
    """Refuse what reads or samples outputs in another way."""
    if configuration.distillation is not None:
        raise ValueError(
            "distillation must be left out if a domain is supervised: nobody has tried them "
            "together"
        )
    if any(map(is_paired, configuration.lanes)):
        raise ValueError(
            "lanes must have no prefill and decode engines if a domain is supervised: a pair gives "
            "no log-probabilities of what it reads"
        )
