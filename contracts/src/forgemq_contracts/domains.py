"""What holds for one domain of a run: what its queue says, else what the run says."""

from typing import TypeVar

import msgspec
from msgspec import Struct

from forgemq_contracts.domain_settings import DomainRewards, DomainSampling
from forgemq_contracts.episodes import HistoryPolicy, Sampling, StreamPolicy
from forgemq_contracts.run import Queue, Rewards, RunConfiguration
from forgemq_contracts.stages import of_domain

OfRun = TypeVar("OfRun", bound=Struct)


def rewards_of(configuration: RunConfiguration, *, domain: str) -> Rewards:
    """How episodes of this domain are scored."""
    queue = _queue(configuration, domain)
    return _with(configuration.rewards, None if queue is None else queue.rewards)


def trains_truncated(configuration: RunConfiguration, *, domain: str) -> bool:
    """Whether the completions of an episode that a limit ended may have a loss in this domain."""
    return rewards_of(configuration, domain=domain).truncated != "no_loss"


def sampling_of(
    configuration: RunConfiguration, *, domain: str, stage: int | None = None
) -> Sampling:
    """How episodes of this domain are sampled in a stage, if their group names no temperature."""
    queue = _queue(configuration, domain)
    sampling = _with(configuration.episodes.sampling, None if queue is None else queue.sampling)
    of_stage = of_domain(configuration.stages, stage, domain=domain)
    return _with(sampling, None if of_stage is None else of_stage.sampling)


def context_tokens_max_of(
    configuration: RunConfiguration, *, domain: str, stage: int | None = None
) -> int:
    """The longest context and output together of an episode of this domain, tokens."""
    queue = _queue(configuration, domain)
    of_stage = of_domain(configuration.stages, stage, domain=domain)
    of_both = None if of_stage is None else of_stage.context_tokens_max
    own = None if queue is None else queue.context_tokens_max
    return of_both or own or configuration.model.context_tokens_max


def history_of(configuration: RunConfiguration, *, domain: str) -> HistoryPolicy:
    """How the episodes of this domain write earlier turns."""
    queue = _queue(configuration, domain)
    own = None if queue is None else queue.history
    return own or configuration.episodes.history


def histories_of(configuration: RunConfiguration) -> tuple[HistoryPolicy, ...]:
    """Every policy that an episode of the run may have, each once."""
    policies = (history_of(configuration, domain=queue.domain) for queue in configuration.queues)
    return tuple(dict.fromkeys(policies))


def stream_of(configuration: RunConfiguration, *, domain: str) -> StreamPolicy:
    """What streamed answers in episodes of this domain wait for."""
    queue = _queue(configuration, domain)
    return "recorded" if queue is None else queue.stream


def has_live_streams(configuration: RunConfiguration) -> bool:
    """Whether an answer of this run may be streamed while it is sampled."""
    return any(queue.stream == "live" for queue in configuration.queues)


def _queue(configuration: RunConfiguration, domain: str) -> Queue | None:
    return next((queue for queue in configuration.queues if queue.domain == domain), None)


def _with(of_run: OfRun, own: DomainRewards | DomainSampling | None) -> OfRun:
    if own is None:
        return of_run
    fields = msgspec.structs.asdict(own)
    given = {name: value for name, value in fields.items() if value is not None}
    return msgspec.structs.replace(of_run, **given)
