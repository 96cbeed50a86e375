"""Rollouts of agents as samples: the shapes that tree training is measured on.

Token ids are random, so nothing is shared but what the shape shares. Lengths jitter by half around
their mean. Shapes A to F scale real agent runs to what a core can train per request; turns,
rollouts and the ratio of prompt to turn stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forgemq_contracts.trees import MergedTree
from forgemq_merger.core.prefix_tree import Delta, build

VOCABULARY = 2048

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A group of rollouts of one task.

    Attributes:
        rollouts: in the group.
        turns: requests of each rollout.
        prompt: tokens of the task, shared by the group.
        act: tokens that a turn samples and keeps in the history, mean.
        observe: tokens that the environment answers, mean.
        think: tokens that a turn samples first and the next request no longer has, mean.
        cut_every: every so many turns the history becomes a summary and the last turns.
        turns_kept: by a cut.
    """

    rollouts: int
    turns: int
    prompt: int
    act: int
    observe: int
    think: int = 0
    cut_every: int = 0
    turns_kept: int = 2


SHAPES = {
    "A": Shape(rollouts=8, turns=8, prompt=1024, act=48, observe=80),
    "B": Shape(rollouts=16, turns=20, prompt=1024, act=24, observe=40),
    "C": Shape(rollouts=16, turns=40, prompt=1024, act=20, observe=30),
    "D": Shape(rollouts=8, turns=16, prompt=1024, act=24, observe=40, think=48),
    "E": Shape(rollouts=8, turns=24, prompt=1024, act=24, observe=40, cut_every=6),
    "F": Shape(rollouts=16, turns=1, prompt=2048, act=256, observe=1),
    "headline": Shape(rollouts=8, turns=60, prompt=1280, act=12, observe=20),
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sequence to train on: a request, or several of a rollout merged into one.

    Attributes:
        tokens: context and what was sampled.
        sampled: indices into `tokens` of the loss entries, ascending.
        behaviour: log-probability of each entry at sampling, nats.
        advantage: of the rollout.
        rollout: index in the group.
    """

    tokens: Int32s
    sampled: npt.NDArray[np.int64]
    behaviour: Float32s
    advantage: float
    rollout: int


def requests(shape: Shape) -> list[Sample]:
    """Every request of the group as a sample of its own, rollout by rollout, turn by turn."""
    generator = np.random.default_rng(0)

    def draw(mean: int, *, exact: bool = False) -> Int32s:
        count = mean if exact else max(1, int(mean * (0.5 + generator.random())))
        return generator.integers(1, VOCABULARY, count, dtype=np.int32)

    nothing = np.zeros(0, np.int32)
    prompt = draw(shape.prompt, exact=True)
    samples = []
    for rollout in range(shape.rollouts):
        advantage = float(np.float32(generator.normal()))
        history: list[Int32s] = []
        summary = nothing
        for turn in range(shape.turns):
            if shape.cut_every and turn and turn % shape.cut_every == 0:
                summary, history = draw(2 * shape.act, exact=True), history[-shape.turns_kept :]
            context = np.concatenate([prompt, summary, *history])
            thought = draw(shape.think) if shape.think else nothing
            act = draw(shape.act)
            tokens = np.concatenate([context, thought, act])
            sampled = np.arange(len(context), len(tokens))
            noise = 0.3 * generator.normal(size=len(sampled))
            samples.append(
                Sample(
                    tokens=tokens,
                    sampled=sampled,
                    behaviour=np.minimum(0, noise - np.log(VOCABULARY)).astype(np.float32),
                    advantage=advantage,
                    rollout=rollout,
                )
            )
            history.append(np.concatenate([act, draw(shape.observe)]))
    return samples


def append_merged(samples: Sequence[Sample]) -> list[Sample]:
    """Sequences where a request that extends the one before it is appended to it."""
    merged: list[Sample] = []
    for sample in samples:
        last = merged[-1] if merged else None
        if last is None or last.rollout != sample.rollout or not _extends(sample, last):
            merged.append(sample)
            continue
        merged[-1] = replace(
            sample,
            sampled=np.concatenate([last.sampled, sample.sampled]),
            behaviour=np.concatenate([last.behaviour, sample.behaviour]),
        )
    return merged


def _extends(sample: Sample, before: Sample) -> bool:
    return np.array_equal(sample.tokens[: len(before.tokens)], before.tokens)


def merged_tree(samples: Sequence[Sample]) -> MergedTree:
    """The group's prefix tree, built by the merger's own tree and in its wire form."""
    deltas = [Delta(-1, 0, sample.tokens) for sample in samples]
    tree = build(deltas, kept=[len(sample.tokens) for sample in samples])
    entry_tokens = [
        np.arange(start, stop)
        for number, sample in enumerate(samples)
        for start, stop in tree.ranges(number, int(sample.sampled[0]), len(sample.tokens))
    ]
    counts = [len(sample.sampled) for sample in samples]
    leaves = [tree.leaf(number, len(sample.tokens)) for number, sample in enumerate(samples)]
    return MergedTree(
        group_id="g-0",
        domain="load",
        tokens=_int32(tree.tokens),
        segment_start=_int32(tree.segment_start),
        segment_length=_int32(tree.segment_length),
        segment_parent=_int32(tree.segment_parent),
        entry_token=_int32(np.concatenate(entry_tokens)),
        entry_logprob=_float32(np.concatenate([sample.behaviour for sample in samples])),
        entry_version=_int32(np.zeros(sum(counts))),
        sample_first_entry=_int32(np.cumsum([0, *counts])),
        sample_advantage=_float32([sample.advantage for sample in samples]),
        sample_temperature=_float32(np.ones(len(samples))),
        sample_leaf=_int32(leaves),
        sample_episode=_int32([sample.rollout for sample in samples]),
        sample_turn=_int32(np.zeros(len(samples))),
        sample_ids=tuple(f"{number:032x}" for number in range(len(samples))),
    )


def _int32(values: npt.ArrayLike) -> bytes:
    return np.asarray(values, dtype="<i4").tobytes()


def _float32(values: npt.ArrayLike) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()
