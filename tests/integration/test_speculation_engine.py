"""A real SGLang server that drafts with a head: the same tokens, and what a push changes."""

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.speculation import Speculation
from forgemq_launcher.commands.new_head import write_new_head
from tests.engine_fixture import (
    ENGINE_MODEL,
    ONE_OR_TWO_PROCESSES,
    engine_options,
    reset_engine,
    started_engine,
)
from tests.integration.draft_heads import acceptance, fitted_head, relay_and_lose, reset_head
from tests.integration.test_cached_tokens import (
    GROUPS,
    SIBLINGS,
    TURNS,
    play,
)
from tests.integration.test_reply_forms_engine import (
    COUNT,
    HELLO,
    check_masked_logprobs,
    contexts_of,
    gateway_on,
)
from tests.integration.test_weights_engine import logprobs, perturbed, sending, spans
from tests.lane_scene import LaneScene, create_topics
from tests.metered import counted, metered

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

CONTEXTS = [[(7 * i + 13 * j) % 690 + 5 for j in range(8)] for i in range(4)]
TOKENS = 40
GAP_NATS_MAX = 1e-4
TOP = 3
NOTHING_HELD_MAX = 1.1
"""Tokens a pass of a head that guesses nothing, with some luck."""
LEARNED_MIN = 1.8


@pytest.fixture(scope="module")
def start_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "start"
    write_new_head(ENGINE_MODEL, folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def other_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "other"
    write_new_head(ENGINE_MODEL, folder, seed=2)
    return folder


@pytest.fixture(scope="module")
def learned_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "learned"
    return fitted_head(ENGINE_MODEL, folder, contexts=CONTEXTS, tokens=TOKENS)


@pytest.fixture(scope="module")
def same_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model's tensors in other bytes, so that a publication of them is loaded."""
    folder = tmp_path_factory.mktemp("same")
    shutil.copytree(ENGINE_MODEL, folder, dirs_exist_ok=True)
    weights = load_file(ENGINE_MODEL / "model.safetensors")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt", "copy": "1"})
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(ENGINE_MODEL, tmp_path_factory.mktemp("trained"), seed=1)


@pytest.fixture(scope="module", params=ONE_OR_TWO_PROCESSES)
def speculating(
    request: Any, start_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    options = engine_options(head=str(start_head), tensor_parallel=request.param)
    with started_engine(tmp_path_factory.mktemp("engine"), options) as url:
        yield url


async def reset(url: str, head: Path) -> None:
    """The engine as it started: on its base weights, and with this head."""
    await asyncio.to_thread(reset_engine, url, ENGINE_MODEL)
    await asyncio.to_thread(reset_head, url, head)


async def scene_of(url: str, head: Path) -> LaneScene:
    """Lane 0 on an engine that began with this head; nothing serves it yet."""
    log = MemoryLog(run="r")
    await create_topics(log)
    guesses = Speculation(head=str(head))
    return LaneScene(log, model=ENGINE_MODEL, engine_url=url, speculation=guesses)


@asynccontextmanager
async def serving_scene(url: str, start_head: Path) -> AsyncIterator[LaneScene]:
    await reset(url, start_head)
    scene = await scene_of(url, start_head)
    async with scene.serving():
        await scene.report(is_serving=True)
        yield scene


async def greedy(scene: LaneScene, *, first: int) -> list[FinishedCompletion]:
    """A greedy completion of each context, in their order; its requests begin with `first`."""
    before = len(await scene.finished())
    for number, context in enumerate(CONTEXTS):
        await scene.request(first + number, context, max_tokens=TOKENS, temperature=0.0)
    records = await scene.finished(count=before + len(CONTEXTS), timeout_s=60)
    return sorted(records[before:], key=lambda record: record.request_id)


def outputs(records: Sequence[FinishedCompletion]) -> list[list[int]]:
    return [unpack_ids(record.output) for record in records]


def gap(records: Sequence[FinishedCompletion], model: Path) -> float:
    """The largest distance of a log-probability from that of plain transformers."""
    return max(
        abs(left - right)
        for context, record in zip(CONTEXTS, records, strict=True)
        for left, right in zip(
            unpack_floats(record.logprobs),
            logprobs(model, context + unpack_ids(record.output), first=len(context)),
            strict=True,
        )
    )


async def test_greedy_tokens_are_those_of_the_policy_alone(
    speculating: str, start_head: Path
) -> None:
    async with serving_scene(speculating, start_head) as scene:
        records = await greedy(scene, first=1)
    policy = AutoModelForCausalLM.from_pretrained(ENGINE_MODEL, dtype=torch.float32)
    for context, output in zip(CONTEXTS, outputs(records), strict=True):
        with torch.no_grad():
            likely = policy(torch.tensor([context + output])).logits[0].argmax(-1)
        assert output == likely[len(context) - 1 : -1].tolist()
    assert gap(records, ENGINE_MODEL) < GAP_NATS_MAX
    assert all(record.verifications > 0 for record in records)
    assert 1.0 <= acceptance(records) < NOTHING_HELD_MAX


async def test_a_pushed_head_changes_how_many_tokens_hold_and_no_token(
    speculating: str, start_head: Path, learned_head: Path, same_policy: Path, other_head: Path
) -> None:
    """On the fast path: a learned head, then the policy alone, then a random head."""
    async with (
        serving_scene(speculating, start_head) as scene,
        sending(f"{same_policy}|{learned_head}", speculating) as trainer,
    ):
        before = await greedy(scene, first=10)
        pushes = [(same_policy, learned_head), (ENGINE_MODEL, None), (same_policy, other_head)]
        measured = []
        for version, (policy, head) in enumerate(pushes, start=1):
            if version > 1:
                await trainer.next_folder(f"{policy}|{head}" if head else policy)  # type: ignore[arg-type]
            offers = await trainer.offer()
            await scene.publish(policy, version=version, fast_paths=offers, head=head)
            await trainer.send()
            assert await trainer.result() == {"0": ""}
            *_, loaded = await scene.loaded(count=1 + version)
            assert (loaded.path, loaded.version) == ("fast", version)
            measured.append(await greedy(scene, first=10 * (version + 1)))
    learned, kept, lost = measured
    assert acceptance(before) < NOTHING_HELD_MAX
    assert acceptance(learned) > LEARNED_MIN
    assert acceptance(kept) == acceptance(learned)
    assert acceptance(lost) < NOTHING_HELD_MAX
    for number, records in enumerate(measured, start=1):
        assert outputs(records) == outputs(before)
        assert gap(records, ENGINE_MODEL) < GAP_NATS_MAX
        assert spans(records[0]) == [(0, len(records[0].output) // 4, 1, number)]


@pytest.mark.parametrize("way", ["durable", "relay"])
async def test_the_files_of_a_head_go_into_the_draft_alone(
    speculating: str,
    start_head: Path,
    learned_head: Path,
    same_policy: Path,
    other_head: Path,
    way: str,
    tmp_path: Path,
) -> None:
    pushes = [(same_policy, learned_head), (ENGINE_MODEL, None), (same_policy, other_head)]
    async with serving_scene(speculating, start_head) as scene:
        measured = []
        for version, (policy, head) in enumerate(pushes, start=1):
            if way == "durable":
                await scene.publish(policy, version=version, head=head)
            else:
                folder = tmp_path / str(version)
                await relay_and_lose(scene, policy, head, version=version, folder=folder)
            *_, loaded = await scene.loaded(count=1 + version)
            path = "durable" if way == "durable" else "fast"
            assert (loaded.path, loaded.version) == (path, version)
            measured.append(await greedy(scene, first=10 * version))
    learned, kept, lost = measured
    assert acceptance(learned) > LEARNED_MIN
    assert acceptance(kept) == acceptance(learned)
    assert acceptance(lost) < NOTHING_HELD_MAX
    for records in measured:
        assert outputs(records) == outputs(learned)
        assert gap(records, ENGINE_MODEL) < GAP_NATS_MAX


async def test_a_late_lane_drafts_with_the_newest_head_of_an_older_version(
    speculating: str, start_head: Path, learned_head: Path, same_policy: Path, other_head: Path
) -> None:
    """The engine is left as a service leaves it that was killed in the middle of an update."""
    await reset(speculating, start_head)
    async with aiohttp.ClientSession(speculating) as session:
        body = {"new_version": "broken", "abort_all_requests": False}
        async with session.post("/update_weight_version", json=body) as response:
            assert response.status == 200
    scene = await scene_of(speculating, start_head)
    await scene.publish(same_policy, version=1, head=other_head)
    await scene.publish(same_policy, version=2, head=learned_head)
    await scene.publish(same_policy, version=3)
    async with scene.serving():
        assert (await scene.report(is_serving=True)).version == 3
        records = await greedy(scene, first=1)
    assert acceptance(records) > LEARNED_MIN
    assert spans(records[0]) == [(0, len(records[0].output) // 4, 1, 3)]


async def test_the_head_of_an_older_version_that_is_gone_costs_nothing_but_its_guesses(
    speculating: str, start_head: Path, learned_head: Path, same_policy: Path, tmp_path: Path
) -> None:
    await reset(speculating, start_head)
    gone = tmp_path / "gone"
    shutil.copytree(learned_head, gone)
    scene = await scene_of(speculating, start_head)
    await scene.publish(same_policy, version=1, head=gone)
    await scene.publish(same_policy, version=2)
    shutil.rmtree(gone)
    async with scene.serving():
        assert (await scene.report(is_serving=True)).version == 2
        records = await greedy(scene, first=1)
    assert len(scene.events_named("head_not_loaded")) == 1
    assert gap(records, ENGINE_MODEL) < GAP_NATS_MAX


async def test_weights_and_head_mid_generation_split_the_output_at_the_version(
    speculating: str, start_head: Path, learned_head: Path, trained: Path
) -> None:
    async with (
        serving_scene(speculating, start_head) as scene,
        sending(f"{trained}|{learned_head}", speculating) as trainer,
    ):
        offers = await trainer.offer()
        for number, context in enumerate(CONTEXTS, start=1):
            await scene.request(number, context, max_tokens=900, temperature=5.0)
        await scene.until_running()
        await scene.publish(trained, version=1, fast_paths=offers, head=learned_head)
        await trainer.send()
        assert await trainer.result() == {"0": ""}
        records = await scene.finished(count=4, timeout_s=240)
    split = [record for record in records if len(record.spans) == 2]
    assert split, [spans(record) for record in records]
    for record in split:
        context = CONTEXTS[int(record.request_id, 16) - 1]
        tokens, end = context + unpack_ids(record.output), record.spans[0].end
        old, new = (
            logprobs(model, tokens, first=len(context), temperature=5.0)
            for model in (ENGINE_MODEL, trained)
        )
        assert unpack_floats(record.logprobs) == pytest.approx(old[:end] + new[end:], abs=1e-3)
        assert record.retractions == 1
        assert record.verifications > 0


async def test_sampled_pairs_follow_the_policy_while_drafted_tokens_hold(
    speculating: str, start_head: Path, learned_head: Path, same_policy: Path
) -> None:
    """Chi-square of 500 draws; the second token of each is drafted and verified."""
    draws, context = 500, CONTEXTS[0]
    async with serving_scene(speculating, start_head) as scene:
        await scene.publish(same_policy, version=1, head=learned_head)
        await scene.loaded(count=2)
        for number in range(draws):
            await scene.request(number, context, max_tokens=3, temperature=1.0, deadline_s=300.0)
        records = await scene.finished(count=draws, timeout_s=300)
    # Three tokens end before most guesses could hold; these many did all the same.
    assert acceptance(records) > 1.05
    expected = pair_law(context)
    drawn = Counter(tuple(unpack_ids(record.output)[:2]) for record in records)
    common = [pair for pair, share in expected.items() if share * draws >= 5]
    assert len(common) >= 10
    rest = draws * (1 - sum(expected[pair] for pair in common))
    rest_counted = draws - sum(drawn[pair] for pair in common)
    statistic = sum(
        (drawn[pair] - draws * expected[pair]) ** 2 / (draws * expected[pair]) for pair in common
    ) + (rest_counted - rest) ** 2 / max(rest, 1.0)
    # Above this once in a million: mean plus five and a half deviations.
    assert statistic < len(common) + 5.5 * (2 * len(common)) ** 0.5 + 12


async def test_the_gateway_expects_one_cached_token_less_of_an_engine_that_guesses(
    speculating: str, start_head: Path
) -> None:
    await reset(speculating, start_head)
    telemetry, held = metered("gateway")
    async with gateway_on(
        speculating,
        ENGINE_MODEL,
        telemetry=telemetry,
        speculation=Speculation(head=str(start_head)),
    ) as world:
        await play(world, first=0)
        outcomes = counted(held(), "gateway.cache_outcomes", by="outcome")
        finished: list[Any] = await world.records(topics.FINISHED_COMPLETIONS)
    assert outcomes.total() == GROUPS * SIBLINGS * TURNS
    assert outcomes["as_expected"] >= 0.99 * outcomes.total(), outcomes
    assert all(record.verifications for record in finished if len(record.output) > 4)


def pair_law(context: list[int]) -> dict[tuple[int, ...], float]:
    """The probability of each pair of next tokens, under plain transformers."""
    policy = AutoModelForCausalLM.from_pretrained(ENGINE_MODEL, dtype=torch.float32)
    ends = policy.config.eos_token_id
    with torch.no_grad():
        first = policy(torch.tensor([context])).logits[0, -1].softmax(-1)
        kept = [int(token) for token in torch.argsort(first, descending=True)[:64]]
        rows = torch.tensor([[*context, token] for token in kept])
        second = policy(rows).logits[:, -1].softmax(-1)
    law: dict[tuple[int, ...], float] = {}
    for place, token in enumerate(kept):
        if token == ends:
            law[(token,)] = float(first[token])
            continue
        for following in torch.argsort(second[place], descending=True)[:32].tolist():
            law[token, following] = float(first[token] * second[place, following])
    return law


async def test_grammars_and_the_likeliest_tokens_are_as_without_guesses(
    speculating: str, learned_head: Path
) -> None:
    """The engine verifies guesses under both: its log-probabilities are the policy's alone."""
    await reset(speculating, learned_head)
    form = {"type": "json_schema", "json_schema": {"name": "c", "strict": True, "schema": COUNT}}
    async with gateway_on(speculating, ENGINE_MODEL) as world:
        chat = world.client(await world.episode()).chat.completions

        async def ask(**fields: Any) -> Any:
            answer = await chat.create(model="m", messages=HELLO, **fields)  # type: ignore[arg-type]
            return answer.choices[0]

        typed = await ask(response_format=form)
        chosen = await ask(extra_body={"guided_choice": ["a", "b"]})
        free = await ask(logprobs=True, top_logprobs=TOP, max_tokens=20)
        records: list[Any] = await world.records(topics.FINISHED_COMPLETIONS)
    assert list(json.loads(typed.message.content)) == ["n"]
    assert chosen.message.content in ("a", "b")
    assert [record.support for record in records] == ["grammar", "grammar", "full"]
    assert all(record.verifications > 0 for record in records)
    contexts = contexts_of(records)
    check_masked_logprobs(ENGINE_MODEL, records[1], contexts, allowed=("a", "b"))
    assert {len(token.top_logprobs) for token in free.logprobs.content} == {TOP}
    check_top_tokens(records[2], contexts[records[2].request_id])


def check_top_tokens(record: FinishedCompletion, whole: Sequence[int]) -> None:
    """At each position of the output they are what plain transformers find the likeliest."""
    output = unpack_ids(record.output)
    policy = AutoModelForCausalLM.from_pretrained(ENGINE_MODEL, dtype=torch.float32)
    with torch.no_grad():
        logits = policy(torch.tensor([list(whole)])).logits[0]
    likely = torch.log_softmax(logits[len(whole) - len(output) - 1 : -1], -1).topk(TOP)
    assert record.top_tokens is not None
    assert unpack_ids(record.top_tokens.ids) == likely.indices.flatten().tolist()
    assert unpack_floats(record.top_tokens.logprobs) == pytest.approx(
        likely.values.flatten().tolist(), abs=GAP_NATS_MAX
    )
