"""Rollouts of agents as samples: the shapes that tree training is measured on.

Token ids are random, so samples share only what their shape makes them share. Lengths vary by half
around their mean. Shapes A to F are real agent runs, scaled down until one core can train every
request alone; turns, rollouts and the ratio of prompt to turn are those of the real runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forgemq_contracts.trees import MergedTree
from forgemq_merger.core.prefix_tree import Delta, build

VOCABULARY = 2048
"""Token ids. Small enough for a CPU; with random ids, requests hardly share a token by accident."""

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A group of rollouts of one task.

    Attributes:
        rollouts: Of the group.
        turns: Requests of each rollout.
        prompt: Tokens of the task, shared by the group.
        act: Tokens that a turn samples and keeps in the history, mean.
        observe: Tokens that the environment answers, mean.
        think: Tokens that a turn samples first, and that later requests do not contain, mean.
        cut_every: After so many turns the history is cut to a summary and its last turns; 0 never.
        turns_kept: Turns that a cut keeps.
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
        tokens: Context and sampled tokens.
        sampled: Indices into `tokens` of the loss entries, ascending.
        behaviour: Log-probability of each entry at sampling, nats.
        advantage: Of the rollout.
        rollout: Index in the group.
    """

    tokens: Int32s
    sampled: npt.NDArray[np.int64]
    behaviour: Float32s
    advantage: float
    rollout: int


def requests(shape: Shape) -> list[Sample]:
    """Every request of the group as one sample, rollout by rollout, turn by turn."""
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
    """The samples, with each request merged into the previous one if it extends it."""
    merged: list[Sample] = []
    for sample in samples:
        previous = merged[-1] if merged else None
        if previous is None or previous.rollout != sample.rollout or not _extends(sample, previous):
            merged.append(sample)
            continue
        merged[-1] = replace(
            sample,
            sampled=np.concatenate([previous.sampled, sample.sampled]),
            behaviour=np.concatenate([previous.behaviour, sample.behaviour]),
        )
    return merged


def _extends(sample: Sample, before: Sample) -> bool:
    return np.array_equal(sample.tokens[: len(before.tokens)], before.tokens)


def merged_tree(samples: Sequence[Sample]) -> MergedTree:
    """The group's prefix tree in its wire form, built by the merger's own code."""
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
