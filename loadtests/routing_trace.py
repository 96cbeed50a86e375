"""What episodes ask for, turn by turn: synthetic, or read from the log of a run that was played."""

import argparse
import asyncio
import os
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from forgemq_bus.kept_records import read_all
from forgemq_bus.log import Place
from forgemq_contracts import topics
from forgemq_contracts.completions import FinishedCompletion
from forgemq_launcher.commands.run_on_broker import run_on_broker
from forgemq_launcher.run_folder import RunFolder

_CONTEXT_TOKENS_MAX = 100_000
_TOOL_S = 3.0


class TurnTrace(Struct, frozen=True):
    """One turn: what it adds to the context, what is sampled, and what the agent then does."""

    added_tokens: int
    output_tokens: int
    tool_s: float


class EpisodeTrace(Struct, frozen=True, kw_only=True):
    """Turns of one episode; the first one adds nothing to the prompt."""

    group: str
    prompt_tokens: int
    turns: tuple[TurnTrace, ...]


def synthetic(*, groups: int, group_size: int, seed: int) -> list[EpisodeTrace]:
    """Episodes of agents that code: a few turns mostly, some have ninety, contexts up to 100k.

    Lengths are log-normal: prompts around 4,000 tokens, 13 turns in four of five groups and 36 in
    the others, results of tools around 540 tokens, outputs around 150, tools around 3 s.
    """
    dice, episodes = random.Random(seed), []
    for number in range(groups):
        prompt_tokens = 3000 + int(dice.lognormvariate(7.0, 0.8))
        mean = 3.6 if dice.random() < 0.2 else 2.6
        for _ in range(group_size):
            count = min(90, max(2, int(dice.lognormvariate(mean, 0.6))))
            episodes.append(
                EpisodeTrace(
                    group=f"g{number}",
                    prompt_tokens=prompt_tokens,
                    turns=_turns(dice, count=count, prompt_tokens=prompt_tokens),
                )
            )
    return episodes


def _turns(dice: random.Random, *, count: int, prompt_tokens: int) -> tuple[TurnTrace, ...]:
    turns: list[TurnTrace] = []
    context_tokens = prompt_tokens
    for index in range(count):
        added = int(dice.lognormvariate(6.3, 0.9)) if index else 0
        output = max(8, int(dice.lognormvariate(5.0, 0.8)))
        if context_tokens + added + output > _CONTEXT_TOKENS_MAX:
            break
        context_tokens += added + output
        turns.append(TurnTrace(added, output, dice.expovariate(1 / _TOOL_S)))
    return tuple(turns)


def of_completions(completions: Sequence[tuple[int, FinishedCompletion]]) -> list[EpisodeTrace]:
    """The traces of completions with the milliseconds at which they ended, in that order.

    Of an episode with forks it has the path that each newest turn extends; the time between two
    turns is what is left of it after the engine's own.
    """
    paths: dict[str, list[tuple[int, FinishedCompletion]]] = defaultdict(list)
    for ended_ms, completion in completions:
        path = paths[completion.episode_id]
        if not path or completion.parent_id == path[-1][1].request_id:
            path.append((ended_ms, completion))
    return [
        EpisodeTrace(
            group=path[0][1].group_id,
            prompt_tokens=len(path[0][1].context) // 4,
            turns=tuple(_turn(path, index) for index in range(len(path))),
        )
        for path in paths.values()
    ]


def _turn(path: Sequence[tuple[int, FinishedCompletion]], index: int) -> TurnTrace:
    ended_ms, completion = path[index]
    tool_s = 0.0
    if index + 1 < len(path):
        next_ms, following = path[index + 1]
        tool_s = (next_ms - ended_ms) / 1000 - following.engine_s - following.queued_s
    added = len(completion.context) // 4 if index else 0
    return TurnTrace(added, len(completion.output) // 4, max(0.0, tool_s))


async def of_run(folder: RunFolder) -> list[EpisodeTrace]:
    """The traces of a run on this machine, from its log."""
    topic = topics.FINISHED_COMPLETIONS
    partitions = topics.partition_count(topic, folder.configuration())
    found: list[tuple[int, FinishedCompletion]] = []
    async with run_on_broker(folder, os.environ) as (log, _):
        async for records in read_all(log, [Place(topic.name, n) for n in range(partitions)]):
            for record in records:
                completion = topics.decode(topic, record.value)
                if isinstance(completion, FinishedCompletion) and completion.failure is None:
                    found.append((record.timestamp_ms, completion))
    return of_completions(sorted(found, key=lambda each: each[0]))


def main() -> None:
    """Write the traces of a run as JSON lines."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("out", type=Path, help="file for the traces")
    arguments = parser.parse_args()
    traces = asyncio.run(of_run(RunFolder(arguments.run)))
    arguments.out.write_bytes(msgspec.json.Encoder().encode_lines(traces))


if __name__ == "__main__":
    main()
