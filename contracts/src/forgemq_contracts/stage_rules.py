"""Which stages a run can have."""

from itertools import pairwise
from math import ceil

from forgemq_contracts.domains import context_tokens_max_of, sampling_of
from forgemq_contracts.mixture import quotas
from forgemq_contracts.run import Queue, RunConfiguration
from forgemq_contracts.stages import SHARE_PARTS, Stage, StageDomain, of_domain, parts_of

_ROUNDING = 1e-6
"""A share may differ by this many thousandths from a whole number of them: it is a float."""


def check_stages(configuration: RunConfiguration) -> None:
    """Refuse stages that cannot work.

    Raises:
        ValueError: Names the field and the rule.
    """
    stages, queues = configuration.stages, {each.domain: each for each in configuration.queues}
    if not stages:
        return
    _check_steps([stage.from_step for stage in stages])
    for index, stage in enumerate(stages):
        _check_domains(stage, queues, name=f"stages.{index}")
        for each in stage.domains:
            _check_limits(configuration, each, index=index)
        for queue, groups in zip(
            configuration.queues, quotas(configuration.queues, stage), strict=True
        ):
            if queue.slots < ceil(groups):
                raise ValueError(
                    f"queues.{queue.domain}.slots (N) must be at least {ceil(groups)}: so many "
                    f"groups of it train in a step of stages.{index}, got N={queue.slots}"
                )
    _check_each_trains(configuration)


def _check_steps(steps: list[int]) -> None:
    if steps[0] != 0:
        raise ValueError(f"stages.0.from_step must be 0: it is the first stage, got {steps[0]}")
    for index, (before, step) in enumerate(pairwise(steps), start=1):
        if step <= before:
            raise ValueError(
                f"stages.{index}.from_step must be above that of the stage before, "
                f"got {step} after {before}"
            )


def _check_domains(stage: Stage, queues: dict[str, Queue], *, name: str) -> None:
    domains = [each.domain for each in stage.domains]
    for each in stage.domains:
        field = f"{name}.domains.{each.domain}"
        if each.domain not in queues:
            raise ValueError(f"{field} must be the domain of a queue: {', '.join(queues)}")
        if domains.count(each.domain) > 1:
            raise ValueError(f"{field} must be there once")
        if abs(each.share * SHARE_PARTS - parts_of(each.share)) > _ROUNDING:
            raise ValueError(f"{field}.share must be in whole thousandths, got {each.share:g}")
        if each.difficulty is not None and not queues[each.domain].task_source:
            raise ValueError(
                f"{field}.difficulty must be left out if the queue has no task_source: it is an "
                f"argument of that function, got {each.difficulty:g}"
            )
    if sum(parts_of(each.share) for each in stage.domains) != SHARE_PARTS:
        shares = " + ".join(f"{each.share:g}" for each in stage.domains)
        raise ValueError(f"{name}.domains: the shares must sum to 1, got {shares}")


def _check_limits(configuration: RunConfiguration, own: StageDomain, *, index: int) -> None:
    of_model = configuration.model.context_tokens_max
    name = f"stages.{index}.domains.{own.domain}"
    limit = context_tokens_max_of(configuration, domain=own.domain, stage=index)
    tokens = sampling_of(configuration, domain=own.domain, stage=index).max_tokens
    if limit > of_model:
        raise ValueError(
            f"{name}.context_tokens_max must be at most model.context_tokens_max, got {limit} and "
            f"{of_model}"
        )
    if (own.context_tokens_max or own.sampling) and tokens >= limit:
        raise ValueError(
            f"{name}.context_tokens_max must be above the max_tokens of its sampling, got {limit} "
            f"and {tokens}"
        )


def _check_each_trains(configuration: RunConfiguration) -> None:
    for queue in configuration.queues:
        said = (
            of_domain(configuration.stages, index, domain=queue.domain)
            for index in range(len(configuration.stages))
        )
        if not any(each is not None and each.share > 0 for each in said):
            raise ValueError(
                f"stages: one must have a share of {queue.domain} above 0, or the queue must be "
                "left out: it would train nothing"
            )
