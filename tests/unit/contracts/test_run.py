"""A configuration that cannot work is refused, and the message names the field."""

import math
import re

import msgspec
import pytest

from forgemq_contracts.distillation import Distillation
from forgemq_contracts.domain_settings import DomainSampling
from forgemq_contracts.episodes import Sampling
from forgemq_contracts.lane_engines import LaneEngines
from forgemq_contracts.live_key import LiveKey
from forgemq_contracts.lora import Lora
from forgemq_contracts.loss import LOSS_KINDS, Loss, SequenceMask
from forgemq_contracts.pool import Pool
from forgemq_contracts.run import (
    Episodes,
    Evaluation,
    Model,
    Optimizer,
    Queue,
    Rewards,
    RunConfiguration,
    Trainer,
)
from forgemq_contracts.run_rules import check
from forgemq_contracts.speculation import Speculation, trained_head, unpublished_head
from forgemq_contracts.stages import Stage, StageDomain
from forgemq_contracts.updates import Updates
from forgemq_trainer.core.loss import loss_function

SOUND = RunConfiguration(
    run="r",
    seed=0,
    model=Model(path="m"),
    queues=(Queue(domain="d", task_source="m:f", agent="m:g"),),
    trainer=Trainer(steps=1),
)


def sampled(**changes: object) -> RunConfiguration:
    return msgspec.structs.replace(SOUND, episodes=Episodes(sampling=Sampling(**changes)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.0),
        ("top_p", 0.9),
        ("top_k", 1),
        ("top_k", 50),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -0.5),
    ],
)
def test_a_pin_that_truncates_the_support_is_refused_for_nothing_would_train(field, value):
    with pytest.raises(ValueError, match=rf"^episodes\.sampling\.{field} is .*nothing would train"):
        check(sampled(**{field: value}))


@pytest.mark.parametrize("pin", [{}, {"temperature": 0.7}, {"top_k": 0}, {"top_p": 1.0}])
def test_a_pin_with_full_support_is_taken(pin):
    check(sampled(**pin))


def test_a_context_that_has_no_room_for_drafted_tokens_is_refused():
    guessing = msgspec.structs.replace(SOUND, speculation=Speculation(head="h", steps=6))
    sampling = Sampling(max_tokens=4)
    for room, is_refused in ((8, False), (7, True)):
        run = msgspec.structs.replace(
            guessing,
            model=Model(path="m", context_tokens_max=room),
            trainer=Trainer(steps=1, tree_tokens_max=64),
            episodes=Episodes(sampling=sampling),
        )
        if is_refused:
            with pytest.raises(ValueError, match=r"^speculation\.steps must be .* got 6 and 7$"):
                check(run)
        else:
            check(run)


def test_a_draft_head_trains_on_any_number_of_ranks_in_any_updates_beside_merged_adapters():
    guessing = msgspec.structs.replace(SOUND, speculation=Speculation(head="h"))
    check(msgspec.structs.replace(guessing, trainer=Trainer(steps=1, world_size=4, shard_ranks=2)))
    check(msgspec.structs.replace(guessing, updates=Updates(minibatches=2, passes=3)))
    check(msgspec.structs.replace(guessing, lora=Lora(publish="merged")))


def test_replicas_of_unequal_numbers_of_ranks_are_refused():
    check(msgspec.structs.replace(SOUND, trainer=Trainer(steps=1, world_size=6, shard_ranks=3)))
    run = msgspec.structs.replace(SOUND, trainer=Trainer(steps=1, world_size=6, shard_ranks=4))
    with pytest.raises(ValueError, match=r"^trainer\.shard_ranks must divide .* got 4 and 6$"):
        check(run)


def test_expert_ranks_divide_the_ranks_of_a_replica_also_beside_adapters():
    uneven = Trainer(steps=1, world_size=4, expert_ranks=3)
    by_world = r"^trainer\.expert_ranks must divide trainer\.world_size: .* got 3 and 4$"
    with pytest.raises(ValueError, match=by_world):
        check(msgspec.structs.replace(SOUND, trainer=uneven))
    even = Trainer(steps=1, world_size=4, expert_ranks=2)
    check(msgspec.structs.replace(SOUND, trainer=even))
    check(msgspec.structs.replace(SOUND, trainer=msgspec.structs.replace(even, shard_ranks=2)))
    replicas = msgspec.structs.replace(even, world_size=8, shard_ranks=4, expert_ranks=8)
    by_replica = r"^trainer\.expert_ranks must divide trainer\.shard_ranks: .* got 8 and 4$"
    with pytest.raises(ValueError, match=by_replica):
        check(msgspec.structs.replace(SOUND, trainer=replicas))
    check(msgspec.structs.replace(SOUND, trainer=even, lora=Lora()))


@pytest.mark.parametrize(
    ("field", "value"),
    [("learning_rate", 1e-2), ("loss_weight", 0.2), ("top_k", 8), ("push_every_steps", 2)],
)
def test_what_says_how_a_head_trains_is_refused_beside_a_small_model(field, value):
    small = Speculation(model="m", steps=5, **{field: value})
    rule = rf"^speculation\.{field} must be left out with speculation\.model: .* got {value}$"
    with pytest.raises(ValueError, match=rule):
        check(msgspec.structs.replace(SOUND, speculation=small))


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("loss.ratio_cap", {"loss": Loss(ratio_cap=math.inf)}),
        ("optimizer.lr", {"optimizer": Optimizer(lr=math.inf)}),
        ("pool.fetch_tokens_per_s", {"pool": Pool(storage="file", fetch_tokens_per_s=math.inf)}),
        ("rewards.alpha", {"rewards": Rewards(alpha=math.inf)}),
        (
            "queues.0.sampling.temperature",
            {
                "queues": (
                    msgspec.structs.replace(
                        SOUND.queues[0], sampling=DomainSampling(temperature=math.inf)
                    ),
                )
            },
        ),
    ],
)
def test_a_number_that_json_has_not_is_refused_by_its_path(path, changes):
    """The run's record would hold null there, which no service reads as it was meant."""
    with pytest.raises(ValueError, match=rf"^{re.escape(path)}: must be finite, got inf$"):
        check(msgspec.structs.replace(SOUND, **changes))


def test_a_run_trains_a_head_if_one_guesses_and_not_if_a_small_model_or_nothing_does():
    head = Speculation(head="h", push_every_steps=3)
    assert trained_head(head) is head
    assert trained_head(Speculation(model="m")) is None
    assert trained_head(None) is None
    # Pushed with version 3, which a run of 3 steps makes and one of 2 does not.
    assert unpublished_head(head, steps=3) == ""
    assert unpublished_head(head, steps=2).startswith("speculation.push_every_steps is 3, above")
    assert unpublished_head(Speculation(model="m"), steps=0) == ""


@pytest.mark.parametrize("given", [Speculation(), Speculation(head="h", model="m")])
def test_what_guesses_is_a_head_or_a_small_model_and_never_both(given):
    with pytest.raises(ValueError, match=r"^speculation\.head or speculation\.model must be given"):
        check(msgspec.structs.replace(SOUND, speculation=given))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculation": Speculation(head="h")}, r"speculation must be left out if lora\.publish"),
        ({"speculation": Speculation(model="m")}, r"speculation must be left out if lora\.publish"),
        ({"pool": Pool(storage="file")}, r"pool must be left out if lora\.publish is adapter"),
        (
            {"model": Model(path="m", engine_quantization="fp8_blocks")},
            r"model\.engine_quantization must be left out if lora\.publish is adapter",
        ),
        ({"lora": Lora(targets=("q_proj", "q_proj"))}, r"lora\.targets must name each layer once"),
    ],
)
def test_what_adapters_cannot_be_combined_with_is_refused_by_name(changes, message):
    adapters = {"lora": Lora(publish="adapter")}
    check(msgspec.structs.replace(SOUND, **adapters, trainer=Trainer(steps=1, world_size=2)))
    with pytest.raises(ValueError, match=f"^{message}"):
        check(msgspec.structs.replace(SOUND, **(adapters | changes)))


def outside_queue(domain: str) -> Queue:
    return Queue(domain=domain, task_source="", agent="")


def queued(*queues: Queue, **changes: object) -> RunConfiguration:
    return msgspec.structs.replace(SOUND, queues=queues, **changes)


def test_a_queue_has_both_an_agent_and_a_task_source_or_neither():
    check(queued(outside_queue("d")))
    with pytest.raises(ValueError, match=r"^queues\.d\.task_source must be given if agent is"):
        check(queued(Queue(domain="d", agent="m:play", task_source="")))
    with pytest.raises(ValueError, match=r"^queues\.d\.agent must be given if task_source is"):
        check(queued(Queue(domain="d", task_source="m:task", agent="")))


@pytest.mark.parametrize(
    ("queue", "evaluated", "message"),
    [
        ({"task_source": "m:task", "task_file": "t.jsonl"}, 0, "task_source must be left out if"),
        ({"agent": "", "task_file": "t.jsonl"}, 0, "agent must be given if task_source is"),
        ({"task_source": "m:task", "held_out_file": "h.jsonl"}, 0, "held_out_file must be left"),
        ({"task_source": "m:task", "task_split": "train"}, 0, "task_split must be left out"),
        ({"task_file": "t", "held_out_split": "test"}, 0, "held_out_split must be left out"),
        ({"task_file": "t.jsonl"}, 8, "held_out_file must be given if evaluation.tasks is above 0"),
    ],
)
def test_files_of_tasks_stand_in_for_a_task_source_and_not_beside_one(queue, evaluated, message):
    fields = {"domain": "d", "agent": "m:play", "task_source": "", **queue}
    with pytest.raises(ValueError, match=rf"^queues\.d\.{message}"):
        check(queued(Queue(**fields), evaluation=Evaluation(tasks=evaluated)))
    both = Queue(
        domain="d", agent="m:play", task_source="", task_file="t.jsonl", held_out_file="h.jsonl"
    )
    check(queued(both, evaluation=Evaluation(tasks=8)))


@pytest.mark.parametrize("given", ["task_source", "task_file"])
def test_an_environment_as_agent_brings_its_own_tasks(given):
    queue = {"domain": "d", "agent": "verifiers:my_env", "task_source": ""}
    check(queued(Queue(**queue), evaluation=Evaluation(tasks=8)))
    with pytest.raises(
        ValueError, match=rf"^queues\.d\.{given} must be left out .*'verifiers:my_env'"
    ):
        check(queued(Queue(**{**queue, given: "m:task"})))


def test_held_out_tasks_need_a_queue_with_an_agent():
    tasks = Evaluation(tasks=8)
    with pytest.raises(ValueError, match=r"^evaluation\.tasks must be 0 if no queue has an agent"):
        check(queued(outside_queue("d"), evaluation=tasks))
    check(queued(outside_queue("outside"), *SOUND.queues, evaluation=tasks))


def live_key(name: str = "desk", *, domain: str = "d", digit: str = "0") -> LiveKey:
    return LiveKey(name=name, domain=domain, key_sha256=digit * 64)


def test_live_keys_differ_in_name_and_key_and_are_of_a_queue():
    own = live_key("other", digit="1")
    check(msgspec.structs.replace(SOUND, live=(live_key(), own)))
    for live, expected in [
        ((live_key(domain="e"),), r"^live\.desk\.domain must be that of a queue, got 'e'"),
        ((live_key(), live_key(digit="1")), r"^live\.name: .* got desk twice"),
        ((live_key(), live_key("other")), r"^live\.key_sha256: .* got 0{64} twice"),
    ]:
        with pytest.raises(ValueError, match=expected):
            check(msgspec.structs.replace(SOUND, live=live))


@pytest.mark.parametrize(
    ("field", "value"),
    [("key_sha256", "my-key"), ("name", "a b"), ("idle_s", 0), ("episodes_max", 0), ("key", "k")],
)
def test_a_live_key_with_a_wrong_field_does_not_decode_and_is_named(field, value):
    given = {"name": "n", "domain": "d", "key_sha256": "0" * 64, field: value}
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(given, LiveKey)


@pytest.mark.parametrize("kind", ["Cispo", "", "cispo2", "my_module", "module:", ":loss"])
def test_an_unknown_loss_is_refused_by_name(kind):
    with pytest.raises(ValueError, match=r"^loss\.kind must be one of cispo, "):
        check(msgspec.structs.replace(SOUND, loss=Loss(kind=kind)))


@pytest.mark.parametrize("mode", ["sampled", "greedy"])
def test_an_evaluation_that_plays_nothing_is_refused(mode):
    none = Evaluation(tasks=3, sampled=False, greedy=False)
    check(msgspec.structs.replace(SOUND, evaluation=msgspec.structs.replace(none, **{mode: True})))
    with pytest.raises(
        ValueError, match=r"^evaluation\.sampled or evaluation\.greedy must be true"
    ):
        check(msgspec.structs.replace(SOUND, evaluation=none))


@pytest.mark.parametrize("kind", [*LOSS_KINDS, "own.module:loss"])
def test_a_known_loss_and_a_users_own_are_taken(kind):
    check(msgspec.structs.replace(SOUND, loss=Loss(kind=kind)))


def test_group_tokens_and_a_normalisation_exclude_each_other():
    check(msgspec.structs.replace(SOUND, loss=Loss(group_tokens=8)))
    both = Loss(normalisation="group", group_tokens=8)
    with pytest.raises(ValueError, match=r"^loss\.group_tokens must be left out if "):
        check(msgspec.structs.replace(SOUND, loss=both))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            Loss(clip_high=0.28),
            r"^loss\.clip_high must be left out if loss\.kind is cispo: it is for ",
        ),
        (
            Loss(kind="gspo", ratio_cap=2.0),
            r"^loss\.ratio_cap .* for cispo and truncated_is, got 2$",
        ),
        (Loss(kind="ppo_clip", mask_high=2.0), r"^loss\.mask_high .* it is for icepop, got 2$"),
        (Loss(kind="own.module:loss", clip_low=0.1), r"^loss\.clip_low must be left out"),
        (Loss(anchor_weight_cap=2.0), r"^loss\.anchor_weight_cap .* is not step_start, got 2$"),
        (Loss(kind="gspo", clip_low=1.1), r"^loss\.clip_low must be at most 1: .*, got 1\.1$"),
    ],
)
def test_a_field_that_the_chosen_loss_does_not_read_is_refused_by_name(loss, message):
    with pytest.raises(ValueError, match=message):
        check(msgspec.structs.replace(SOUND, loss=loss))


@pytest.mark.parametrize(("low", "high"), [(0.5, 0.9), (1.0, 2.0), (1.5, 2.0), (8.0, 0.1)])
def test_a_band_that_masks_what_the_newest_policy_sampled_is_refused(low, high):
    for loss, field in [
        (Loss(kind="icepop", mask_low=low, mask_high=high), "mask_low"),
        (Loss(sequence_mask=SequenceMask(low=low, high=high)), r"sequence_mask\.low"),
    ]:
        with pytest.raises(ValueError, match=rf"^loss\.{field} must be below 1 and "):
            check(msgspec.structs.replace(SOUND, loss=loss))


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_every_known_loss_is_one_of_the_trainer(kind):
    assert callable(loss_function(Loss(kind=kind)))


@pytest.mark.parametrize("limit", [None, 1000])
def test_a_tree_limit_has_room_for_the_longest_episode(limit):
    model = Model(path="m", context_tokens_max=1000)
    sampling = Episodes(sampling=Sampling(max_tokens=10))
    sound = msgspec.structs.replace(
        SOUND,
        model=model,
        episodes=sampling,
        trainer=Trainer(steps=1, tree_tokens_max=limit),
    )
    check(sound)
    trainer = Trainer(steps=1, tree_tokens_max=999)
    with pytest.raises(ValueError, match=r"^trainer\.tree_tokens_max must be at least .* 999 and"):
        check(msgspec.structs.replace(sound, trainer=trainer))


@pytest.mark.parametrize(
    "named",
    ["awq", "gptq", "int8", "w8a8_int8", "fp8", "fp8_per_tensor", "mxfp4", "mxfp8", "nvfp4", ""],
)
def test_a_format_that_the_trainer_cannot_write_is_refused_by_name(named):
    run = msgspec.structs.replace(SOUND, model=Model(path="m", engine_quantization=named))
    rule = rf"^model\.engine_quantization must be one of none, fp8_blocks: .* got '{named}'$"
    with pytest.raises(ValueError, match=rule):
        check(run)


@pytest.mark.parametrize(
    "flag", ["--quantization", "--quantization=awq", "--quant", "--modelopt-quant"]
)
def test_a_format_among_the_flags_of_an_engine_is_refused(flag):
    run = msgspec.structs.replace(SOUND, lanes=(LaneEngines(flags=(flag, "awq")),))
    with pytest.raises(ValueError, match=r"^lanes\.0\.flags .* model\.engine_quantization says it"):
        check(run)


def test_a_stage_that_samples_at_another_temperature_than_the_teachers_is_refused():
    stage = StageDomain(domain="d", share=1.0, sampling=DomainSampling(temperature=0.7))
    taught = msgspec.structs.replace(
        SOUND,
        distillation=Distillation(url="http://t:1"),
        stages=(Stage(from_step=0, domains=(StageDomain(domain="d", share=1.0),)),),
    )
    check(taught)
    colder = msgspec.structs.replace(
        taught, stages=(*taught.stages, Stage(from_step=2, domains=(stage,)))
    )
    with pytest.raises(ValueError, match=r"^distillation must be left out .* samples at 0\.7$"):
        check(colder)
