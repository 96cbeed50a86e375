"""The episodes that a plan counts with: turns, and tokens that are read and sampled.

A run's file bounds an episode and does not say how long one is. Without more, a plan takes one turn
that fills the context.
"""

import re
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import fields, replace

from forgemq_contracts.domains import context_tokens_max_of, sampling_of
from forgemq_contracts.run import Queue, RunConfiguration


class EpisodesError(ValueError):
    """The run has no such episodes; the text names the option and the rule."""


class EpisodeShape(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A usual episode of a group.

    Attributes:
        turns: Completions.
        prompt: Tokens before the first, the same in all episodes of a group.
        sampled: Tokens of each completion.
        observed: Tokens between two completions: what a tool or a user answered.
        task_bytes: Of the task as JSON.
    """

    turns: int
    prompt: int
    sampled: int
    observed: int = 0
    task_bytes: int = 600

    @property
    def own_tokens(self) -> int:
        """Tokens that no other episode of the group has."""
        return self.turns * self.sampled + (self.turns - 1) * self.observed

    @property
    def tokens(self) -> int:
        """All tokens of the episode's last context and output."""
        return self.prompt + self.own_tokens

    @property
    def mean_context(self) -> float:
        """Tokens before a sampled token, on average."""
        between = (self.turns - 1) * (self.sampled + self.observed) / 2
        return self.prompt + between + self.sampled / 2


def episode_of(stated: str, queue: Queue, configuration: RunConfiguration) -> EpisodeShape:
    """The usual episode of a queue.

    Args:
        stated: As in `turns=10,prompt=2000,sampled=240,observed=360`; "" for the run's limits.
        queue: Of the run.
        configuration: Of the run.

    Raises:
        EpisodesError: a field that is unknown, wrong or too long for the run.
    """
    context = context_tokens_max_of(configuration, domain=queue.domain)
    sampled_max = sampling_of(configuration, domain=queue.domain).max_tokens
    usual = EpisodeShape(turns=1, prompt=context - sampled_max, sampled=sampled_max)
    if not stated:
        return usual
    shape = replace(usual, **dict(_stated(stated)))
    if shape.sampled > sampled_max:
        raise EpisodesError(
            f"--episode sampled: at most the max_tokens of queues.{queue.domain}, "
            f"got {shape.sampled} and {sampled_max}"
        )
    if shape.tokens > context:
        raise EpisodesError(
            f"--episode: {shape.tokens} tokens are more than the context_tokens_max of "
            f"queues.{queue.domain}, {context}"
        )
    return shape


def _stated(text: str) -> Iterator[tuple[str, int]]:
    names = [field.name for field in fields(EpisodeShape)]
    left = set(names)
    for part in text.split(","):
        name, _, value = (each.strip() for each in part.partition("="))
        if name not in names:
            raise EpisodesError(f"--episode: no such field {name!r}; there are {', '.join(names)}")
        if name not in left:
            raise EpisodesError(f"--episode {name}: is stated twice")
        left.remove(name)
        least = 0 if name == "observed" else 1
        if not re.fullmatch(r"\d{1,9}", value) or int(value) < least:
            raise EpisodesError(f"--episode {name}: a number of at least {least}, got {value!r}")
        yield name, int(value)


class GroupTokens(Struct, frozen=True, kw_only=True):
    """How the tokens of a group lie: a shared beginning, and a chain for each episode."""

    shared: int
    own: int
    episodes: int

    @property
    def tokens(self) -> int:
        """Of the group's tree."""
        return self.shared + self.episodes * self.own


def usual_group(shape: EpisodeShape, *, episodes: int) -> GroupTokens:
    """A group of so many usual episodes."""
    return GroupTokens(shared=shape.prompt, own=shape.own_tokens, episodes=episodes)


def largest_group(queue: Queue, configuration: RunConfiguration, *, turns: int) -> GroupTokens:
    """The largest group of a queue: every episode fills the context.

    Episodes of one turn share what leaves the policy its tokens. Those of several may share
    nothing. Forks can make a tree larger yet; the merger fails it above `trainer.tree_tokens_max`.
    """
    context = context_tokens_max_of(configuration, domain=queue.domain)
    sampled = sampling_of(configuration, domain=queue.domain).max_tokens
    shared = context - sampled if turns == 1 else 0
    return GroupTokens(shared=shared, own=context - shared, episodes=queue.group_size)
