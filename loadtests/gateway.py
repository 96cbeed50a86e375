"""What does the gateway cost for each request, and what do others' proxies cost for theirs?

Agents send bodies of 26 KB and more with each turn, as coding agents do. The gateway has one core
for itself, all else shares the others. `make load NAME=gateway`.

`tokenized`: chat completions, whole and as streams, and every other protocol; the gateway matches
the history, renders and tokenises what is new, writes and reads its records and translates the
answer, on the log in memory (`gateway_alone.py`). `live streams of 1 s` get their answers in ten
pieces while they are sampled, `streams of 1 s` get the same ones from the record. Beside it, on the
same core with the same bytes: an aiohttp pass-through and LiteLLM's proxy, which do none of that
(`gateway_baselines.py`).

In the other cases broker, gateway, inference, scheduler, reward and merger are real, each in its
own process; engine and trainer are stand-ins.
`tokenized, through Kafka`: the same turns; the gateway's cost with that of the broker's client.
`through_kafka`: 200 turns a second, due by a clock: what all services add to the engine's time. All
processes share all cores. `bare_added_ms` is what a bare HTTP server and two topics add to as many
requests there, which compute nothing (`data_path_bare.py`): no system of this kind adds less.
`context_200k`: a history of 200,000 tokens in each body, against one of 2,000.
`pass_through`: a gateway that owns no group and sends every request on (`gateway_passing.py`).
"""

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import msgspec
from data_path_agents import Played, message
from data_path_bare import Shape, bare_added_ms
from data_path_system import RunningSystem, Workload, model_folder, run_configuration, running
from gateway_alone import Target, alone
from gateway_baselines import Asked, Baselines, Proxied, ProxiedRounds, install_litellm
from gateway_passing import passing_cost, until_serving
from measurement import Measurement, arguments
from msgspec import Struct
from msgspec.structs import asdict, replace
from pinning import cpu_s, measure_apart, measure_together
from protocol_speakers import SPEAKERS
from stand_in_answers import Speed

SYSTEM = Workload(
    agents=256,
    turns=30,
    prompt_messages=1,
    message_words=2_900,
    turn_words=8,
    output_tokens=32,
    engine_s=0.02,
    context_tokens_max=262_144,
    group_size=8,
    groups_per_step=4,
    slots=512,
    warm_up_s=15.0,
    measure_s=20.0,
)
WORDS = "description parameters properties arguments assistant function product medium " * 4


class Load(Struct, frozen=True, kw_only=True):
    """How the agents of one case play; what is absent is as in `SYSTEM`."""

    agents: int = 32
    protocol: str = "chat"
    is_stream: bool = False
    is_live: bool = False
    engine_s: float = SYSTEM.engine_s
    turns_per_second: float = 0.0
    turns: int = SYSTEM.turns
    prompt_messages: int = SYSTEM.prompt_messages
    message_words: int = SYSTEM.message_words


ALONE = {
    "tokenized": Load(),
    "tokenized, 256 at once": Load(agents=256),
    "stream_tokenized": Load(is_stream=True),
    **{
        f"tokenized, {name}": Load(protocol=name)
        for name in ("completions", "messages", "responses")
    },
    "streams of 1 s": Load(agents=256, is_stream=True, engine_s=1.0),
    "live streams of 1 s": Load(agents=256, is_stream=True, engine_s=1.0, is_live=True),
}
THROUGH = "through_kafka"
WHOLE = {
    "tokenized, through Kafka": Load(),
    THROUGH: Load(agents=64, turns_per_second=200.0),
    "context_2k": Load(agents=8, turns=48, prompt_messages=47, message_words=18),
    "context_200k": Load(agents=8, turns=48, prompt_messages=47, message_words=2_075),
}
PASSED = "pass_through"

# About what the log gets for a turn whose context is a delta, in both topics.
LOG_BYTES = 4_000

# The cases that the proxies are compared with, in the same form. Within minutes a machine's speed
# changes by a fifth, so they take turns with the proxies, and the median of the rounds counts.
FORMS = {"tokenized": "whole", "stream_tokenized": "stream"}
ROUNDS = 3


class Seen(Struct, frozen=True, kw_only=True):
    """One case: CPU time of gateway and inference in its window, and the turns that ended there.

    Attributes:
        added_ms: What each turn took beyond the engine's time, sorted.
        rounds_ms: The gateway's CPU time a request in each round that was played.
        bare_added_ms: The same of the bare system's requests; [] if it was not asked.
    """

    gateway_ms: float
    inference_ms: float | None
    per_second: float
    added_ms: list[float]
    body_bytes: float
    context_tokens: float
    rounds_ms: list[float]
    bare_added_ms: list[float] = []


async def seen_of(target: Target, case: str, load: Load, *, folder: Path) -> Seen:
    """Let agents play, and measure once they have warmed up."""
    out = folder / f"{case.replace(' ', '-').replace(',', '')}.jsonl"
    async with _agents(target, load, out=out):
        await asyncio.sleep(SYSTEM.warm_up_s)
        # A core apart is for the cost of a turn. Its time depends on all processes it passes.
        (measure_together if load.turns_per_second else measure_apart)(target.gateway)
        before, began_s = _cpu_s(target), time.monotonic()
        await asyncio.sleep(SYSTEM.measure_s)
        after, ended_s = _cpu_s(target), time.monotonic()
    lines = await asyncio.to_thread(out.read_bytes)
    played = [
        each
        for each in msgspec.json.Decoder(Played).decode_lines(lines)
        if began_s <= each.ended_s < ended_s
    ]
    if not played:
        raise TimeoutError(f"{case}: no turn ended within {SYSTEM.measure_s:.0f} s")
    costs = [1000 * (used - had) / len(played) for used, had in zip(after, before, strict=True)]
    return Seen(
        gateway_ms=costs[0],
        rounds_ms=costs[:1],
        inference_ms=costs[1] if len(costs) > 1 else None,
        per_second=len(played) / (ended_s - began_s),
        added_ms=sorted(1000 * (each.took_s - load.engine_s) for each in played),
        body_bytes=statistics.fmean(each.body_bytes for each in played),
        context_tokens=statistics.fmean(each.context_tokens for each in played),
    )


def _cpu_s(target: Target) -> list[float]:
    """CPU time of the gateway, and of inference if that is a process of its own."""
    inference = [] if target.inference is None else [cpu_s(target.inference)]
    return [target.gateway_cpu_s(), *inference]


@contextlib.asynccontextmanager
async def _agents(target: Target, load: Load, *, out: Path) -> AsyncIterator[None]:
    """Agents in a process of their own, until the block ends and they have written `out`."""
    own_of_gateway = ("is_live", "engine_s")
    settings: dict[str, object] = {
        **{name: value for name, value in asdict(load).items() if name not in own_of_gateway},
        "url": target.url,
        "admin_key": target.admin_key,
        "group_size": SYSTEM.group_size,
        "turn_words": SYSTEM.turn_words,
        "tokens_max": SYSTEM.output_tokens,
        "out": out,
        "name": out.stem,
    }
    own = {f"FORGEMQ_LOAD_AGENTS_{name.upper()}": str(value) for name, value in settings.items()}
    program = str(Path(__file__).with_name("data_path_agents.py"))
    process = await asyncio.create_subprocess_exec(sys.executable, program, env=os.environ | own)
    try:
        yield
        if process.returncode is not None:
            raise RuntimeError(f"the agents ended with exit status {process.returncode}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def _asked(*, is_stream: bool) -> Asked:
    prompt = message("user", "function " * (26_000 // 9))
    body = SPEAKERS["chat"].body([prompt], tokens_max=SYSTEM.output_tokens, is_stream=is_stream)
    return Asked(body=body, reply=WORDS.strip(), clients=32)


async def measure_alone(
    folder: Path, wanted: Mapping[str, Load], baselines: Baselines
) -> dict[str, Seen]:
    """Start a gateway on the log in memory for each wanted case, play it, then ask the proxies."""
    await asyncio.to_thread(folder.mkdir)
    model = model_folder(folder / "model", context_tokens_max=SYSTEM.context_tokens_max)
    configuration = run_configuration("gateway", SYSTEM, model=model)
    (queue,) = configuration.queues
    live = replace(configuration, queues=(replace(queue, stream="live"),))
    found = {}
    for case, load in wanted.items():
        speed = Speed(tokens=SYSTEM.output_tokens, latency_s=load.engine_s)
        played = live if load.is_live else configuration
        rounds = []
        for _ in range(ROUNDS if case in FORMS else 1):
            async with alone(folder, played, speed=speed) as target:
                rounds.append(await seen_of(target, case, load, folder=folder))
            if case in FORMS:
                await baselines.measure(_asked(is_stream=load.is_stream), FORMS[case])
        found[case] = _together(rounds)
    return found


def _together(rounds: Sequence[Seen]) -> Seen:
    """The round whose cost is the median, with the costs of all."""
    ordered = sorted(rounds, key=lambda each: each.gateway_ms)
    median = ordered[len(ordered) // 2]
    return replace(median, rounds_ms=[each.gateway_ms for each in rounds])


async def measure_whole(
    folder: Path, wanted: Mapping[str, Load], *, has_passing: bool
) -> tuple[dict[str, Seen], Proxied | None]:
    """Start the system once and play every wanted case on it, and then what is only passed on."""
    found, passed = {}, None
    async with running("gateway", SYSTEM, folder=folder, left_out=("agents",)) as system:
        await until_serving(system.gateway_url)
        target = _whole(system)
        for case, load in wanted.items():
            found[case] = await seen_of(target, case, load, folder=folder)
        if has_passing:
            passed = await passing_cost(system, _asked(is_stream=False))
        await system.supervisor.stop()
        if THROUGH in found:
            found[THROUGH] = await _beside_bare(found[THROUGH], kafka=system.kafka)
    return found, passed


async def _beside_bare(seen: Seen, *, kafka: str) -> Seen:
    """The case with what the bare system adds to as many requests of the same size."""
    load = WHOLE[THROUGH]
    measure_together(os.getpid())
    shape = Shape(
        kafka=kafka,
        body_bytes=round(seen.body_bytes),
        reply_bytes=len(WORDS),
        log_bytes=LOG_BYTES,
        engine_s=load.engine_s,
        clients=load.agents,
        linger_ms=0,
    )
    added_ms = await bare_added_ms(shape, per_second=load.turns_per_second)
    return replace(seen, bare_added_ms=added_ms)


def _whole(system: RunningSystem) -> Target:
    processes = {status.name: status.pid for status in system.supervisor.statuses()}
    gateway = processes["gateway"]
    assert gateway is not None, "it has served before"
    return Target(
        url=system.gateway_url,
        admin_key=system.folder.admin_key(),
        gateway=gateway,
        inference=processes["inference-0"],
    )


def report(measurement: Measurement, seen: Mapping[str, Seen]) -> None:
    """Rows of each case, and the ratios of the cases to each other and to the proxies."""
    for case, each in seen.items():
        rows = [
            ("cpu", each.gateway_ms, "ms a request"),
            *(
                []
                if each.inference_ms is None
                else [("cpu_inference", each.inference_ms, "ms a request")]
            ),
            ("requests_per_second", each.per_second, "1/s"),
            ("body", each.body_bytes / 1000, "KB"),
            ("context", each.context_tokens, "tokens"),
            *_percentiles("added_ms", each.added_ms),
            *_percentiles("bare_added_ms", each.bare_added_ms),
        ]
        for metric, value, unit in rows:
            measurement.row(case, metric, value, unit)
    own = {case: each.gateway_ms for case, each in seen.items()}
    _ratio(
        measurement, "tokenized", "growth_c32_to_c256", own, "tokenized, 256 at once", "tokenized"
    )
    streams = ("live streams of 1 s", "streams of 1 s")
    _ratio(measurement, streams[0], "cpu_over_recorded", own, *streams)
    _ratio(measurement, "context_200k", "cpu_over_2k", own, "context_200k", "context_2k")
    both = {case: each.gateway_ms + (each.inference_ms or 0.0) for case, each in seen.items()}
    _ratio(measurement, "context_200k", "cpu_of_both_over_2k", both, "context_200k", "context_2k")
    for case, each in seen.items():
        _over_bare(measurement, case, each)


def _percentiles(metric: str, sorted_ms: Sequence[float]) -> list[tuple[str, float, str]]:
    return [
        (f"{metric}_p{percent}", sorted_ms[len(sorted_ms) * percent // 100], "ms")
        for percent in (50, 99)
        if sorted_ms
    ]


def _over_bare(measurement: Measurement, case: str, seen: Seen) -> None:
    """What the services add over what the bare system adds, if that was asked."""
    added = _percentiles("over_bare", seen.added_ms)
    bare = _percentiles("over_bare", seen.bare_added_ms)
    for (metric, added_ms, _), (_, bare_ms, _) in zip(added, bare, strict=False):
        measurement.row(case, metric, added_ms / bare_ms, "x")


def _ratio(
    measurement: Measurement,
    case: str,
    metric: str,
    costs: Mapping[str, float],
    over: str,
    under: str,
) -> None:
    if over in costs and under in costs:
        measurement.row(case, metric, costs[over] / costs[under], "x")


def report_proxied(
    measurement: Measurement,
    kind: str,
    costs: Mapping[str, ProxiedRounds],
    seen: Mapping[str, Seen],
    passed: Proxied | None,
) -> None:
    """Rows of a proxy, and its ratios to the gateway."""
    for form, cost in costs.items():
        measurement.row(f"{kind}, {form}", "cpu", cost.cpu_ms, "ms a request")
        measurement.row(f"{kind}, {form}", "requests_per_second", cost.per_second, "1/s")
    if kind == "aiohttp" and passed is not None:
        measurement.row(PASSED, "cpu", passed.cpu_ms, "ms a request")
        measurement.row(PASSED, "requests_per_second", passed.per_second, "1/s")
        ratio = passed.cpu_ms / costs["whole"].cpu_ms
        measurement.row(PASSED, "aiohttp_cpu_ratio", ratio, "x")
    for case, form in {**FORMS, "tokenized, through Kafka": "whole"}.items():
        if case not in seen:
            continue
        ratio = costs[form].median_of(seen[case].rounds_ms)
        measurement.row(case, f"{kind}_cpu_ratio", ratio if kind == "aiohttp" else 1 / ratio, "x")


async def measure(names: Sequence[str]) -> tuple[dict[str, Seen], Proxied | None, Baselines]:
    """Play the named cases, or all of them."""

    def wanted(cases: Mapping[str, Load]) -> dict[str, Load]:
        return {case: load for case, load in cases.items() if not names or case in names}

    has_passing, passed = not names or PASSED in names, None
    baselines = Baselines()
    with tempfile.TemporaryDirectory(prefix="forgemq-load-") as name:
        folder = Path(name)
        seen = await measure_alone(folder / "alone", wanted(ALONE), baselines)
        if has_passing or wanted(WHOLE):
            found, passed = await measure_whole(folder, wanted(WHOLE), has_passing=has_passing)
            seen |= found
    for form in FORMS.values():
        if not baselines.has(form):
            await baselines.measure(_asked(is_stream=form == "stream"), form)
    return seen, passed, baselines


def main() -> int:
    """Measure the named cases, or all of them."""
    options = arguments(__doc__ or "")
    measurement = Measurement(
        name="gateway",
        question="What does the gateway cost for each request, and what do others' proxies cost?",
    )
    measurement.conditions["load average, before"] = f"{os.getloadavg()[0]:.1f}"
    seen, passed, baselines = asyncio.run(measure(options.case))
    report(measurement, seen)
    for kind, costs in baselines.costs.items():
        report_proxied(measurement, kind, costs, seen, passed)
    measurement.conditions["litellm"] = install_litellm()
    measurement.conditions["load average, after"] = f"{os.getloadavg()[0]:.1f}"
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
