"""`python -m forgemq_trainer.plan`: what the trainer would do, without a GPU and without weights.

Questions and answers are those of `forgemq_contracts.trainer_plan`, a line each. The answers come
from the functions that train: the same shape of the model, planner of memory and formula of FLOPs.
"""

import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import nn
from transformers.utils.logging import set_verbosity_error

from forgemq_contracts.draft_head import HeadShape, head_shape, head_tensors
from forgemq_contracts.lora import Lora
from forgemq_contracts.rank_rules import shard_ranks_of
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.speculation import trained_head
from forgemq_contracts.topics import MERGED_TREES, decode
from forgemq_contracts.trainer_plan import (
    AskedModel,
    AskedStep,
    PlannedGroup,
    PlannedModel,
    PlannedStep,
    PlanQuestion,
    RefusedPlan,
)
from forgemq_contracts.trees import MergedTree
from forgemq_settings.environment import SettingsError
from forgemq_trainer.core.attention.gpu_attention import GpuAttention
from forgemq_trainer.core.low_rank import AdapterShape, add_adapters
from forgemq_trainer.core.memory import ModelShape, least_budget_bytes
from forgemq_trainer.core.planned_step import Ranks, planned_group, planned_step
from forgemq_trainer.core.traffic import GatheredValues, RankGrid
from forgemq_trainer.core.tree import Forest, InvalidTreeError, read_tree
from forgemq_trainer.draft_head import check_policy, draft_shape
from forgemq_trainer.families import check_expert_rows, check_head_size, check_supported
from forgemq_trainer.model import DTYPES
from forgemq_trainer.model_config import (
    REFUSALS,
    built,
    model_config,
)
from forgemq_trainer.model_sizes import (
    expert_count,
    gathered_values,
    head_size_of,
    key_heads_of,
    latent_shape,
    model_shape,
)
from forgemq_trainer.start_checks import check_expert_ranks

_PARTS = {
    ".embed_tokens.": "embedding",
    "lm_head.": "head",
    ".self_attn.": "attention",
    ".mlp.experts.": "experts",
    ".mlp.gate.": "other",
    ".mlp.": "mlp",
}
"""What a parameter does, by its name in transformers; the first that matches. Others are norms."""


def main() -> None:
    """Answer each line of standard input until it ends."""
    set_verbosity_error()
    for line in sys.stdin.buffer:
        question = msgspec.json.decode(line, type=PlanQuestion)
        sys.stdout.buffer.write(msgspec.json.encode(answer(question)) + b"\n")
        sys.stdout.buffer.flush()


def answer(question: PlanQuestion) -> PlannedModel | PlannedStep | RefusedPlan:
    """The answer to one question; a config.json that transformers refuses is refused by name."""
    try:
        config = model_config(question.config)
        if isinstance(question, AskedModel):
            sizes = _sizes_or_family(config, question.lora)
            head = _head_parameters(question.config) if question.has_head else 0
            return msgspec.structs.replace(sizes, draft_head=head)
    except SettingsError as error:
        return RefusedPlan(reason=str(error))
    try:
        return step_of(config, question)
    except (SettingsError, InvalidTreeError) as error:
        return PlannedStep(refusal=str(error))


def _sizes_or_family(config: Any, lora: Lora | None) -> PlannedModel:  # noqa: ANN401
    """What `sizes_of` returns; of a family that is refused, and has no such sizes, why it is.

    Raises:
        SettingsError: as `sizes_of`, or the family is refused.
    """
    try:
        return sizes_of(config, lora)
    except (SettingsError, *REFUSALS):
        check_supported(config)
        raise


def sizes_of(config: Any, lora: Lora | None = None) -> PlannedModel:  # noqa: ANN401
    """Parameters of transformers' model of this configuration, counted without their memory.

    Raises:
        SettingsError: the model cannot be built, or has no layer of a target.
    """
    model = model_without_memory(config)
    counts = dict.fromkeys({*_PARTS.values()}, 0)
    layers: dict[str, int] = {}
    experts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        counts[_part_of(name)] += parameter.numel()
        if ".layers." in name:
            layer = name.partition(".layers.")[2].partition(".")[0]
            layers[layer] = layers.get(layer, 0) + parameter.numel()
            if _part_of(name) == "experts":
                experts[layer] = experts.get(layer, 0) + parameter.numel()
    query_heads, latent = int(config.num_attention_heads), latent_shape(config)
    chosen = int(getattr(config, "num_experts_per_tok", None) or 0)
    adapters = 0 if lora is None else _adapters_of(model, lora).parameters * len(layers)
    return PlannedModel(
        model_type=str(config.model_type),
        layers=int(config.num_hidden_layers),
        layer_max=max(layers.values()),
        layer_experts_max=max(experts.values(), default=0),
        query_heads=query_heads,
        key_heads=key_heads_of(config),
        head_size=head_size_of(config),
        latent_size=0 if latent is None else latent.key_rank + latent.rotary_size,
        experts_count=expert_count(config) if chosen else 0,
        experts_per_token=chosen,
        adapters=adapters,
        **counts,
    )


def _head_parameters(config: bytes) -> int:
    """Parameters of the draft head that `forgemq new-head` writes for a model."""
    return sum(math.prod(shape) for shape in head_tensors(_head_shape(config)).values())


def _head_shape(config: bytes) -> HeadShape:
    """Sizes of that head.

    Raises:
        SettingsError: the model's configuration lacks a size.
    """
    try:
        return head_shape(config)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def model_without_memory(config: Any) -> nn.Module:  # noqa: ANN401
    """Transformers' model of this configuration, whose parameters have sizes and no memory.

    Raises:
        ModelConfigError: its family has no causal language model, or not one of these sizes.
    """
    with torch.device("meta"):
        model: nn.Module = built(config)
    return model


def _adapters_of(model: nn.Module, lora: Lora) -> AdapterShape:
    """The adapters that a run trains of a model, which has them afterwards.

    Raises:
        SettingsError: the model has no layer of a target.
    """
    try:
        return add_adapters(model, lora)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _part_of(name: str) -> str:
    return next((part for text, part in _PARTS.items() if text in name), "other")


def step_of(config: Any, asked: AskedStep) -> PlannedStep:  # noqa: ANN401
    """The plan of a step and of the largest groups.

    Raises:
        SettingsError: the trainer does not take the model or the configuration.
        InvalidTreeError: a tree is damaged.
    """
    run = asked.configuration
    check_supported(config)
    check_expert_rows(config, dtype=DTYPES[run.model.dtype])
    check_expert_ranks(config, run.trainer)
    shape = shape_of(config, run, device=asked.device)
    if trained_head(run.speculation) is not None:
        check_policy(str(config.model_type))
        head, is_sharing = _head_shape(asked.config), run.trainer.world_size > 1
        shape = replace(shape, draft=draft_shape(head, policy=shape, is_sharing=is_sharing))
    ranks = Ranks(
        grid=RankGrid(
            shards=shard_ranks_of(run.trainer),
            replicas=run.trainer.world_size // shard_ranks_of(run.trainer),
        ),
        values=_values_of(config, run),
        budget_bytes=run.trainer.memory_budget_bytes,
        head_chunk=run.trainer.head_chunk_tokens,
    )
    # Groups of one tree share it: the planner only reads it.
    forests = [tree for each in asked.step for tree in [_forest(each.tree)] * each.groups]
    step = planned_step(forests, shape=shape, ranks=ranks)
    return msgspec.structs.replace(
        step,
        least_budget_bytes=least_budget_bytes(
            shape,
            longest_path=run.model.context_tokens_max,
            head_chunk=run.trainer.head_chunk_tokens,
        ),
        largest=tuple(_groups(asked.largest, shape=shape, ranks=ranks)),
    )


def _values_of(config: Any, run: RunConfiguration) -> GatheredValues:  # noqa: ANN401
    model = model_without_memory(config)
    if run.lora is not None:
        _adapters_of(model, run.lora)
    return gathered_values(
        model, shards=shard_ranks_of(run.trainer), expert_ranks=run.trainer.expert_ranks
    )


def shape_of(config: Any, run: RunConfiguration, *, device: str) -> ModelShape:  # noqa: ANN401
    """The shape that a trainer on this device has for its plans.

    Raises:
        SettingsError: the device has no kernels for the size of its heads, or the model no layer
            of an adapter's target.
    """
    shape = model_shape(config, dtype=DTYPES[run.model.dtype])
    shape = replace(shape, expert_ranks=run.trainer.expert_ranks)
    if run.lora is not None:
        shape = replace(shape, adapters=_adapters_of(model_without_memory(config), run.lora))
    head_size = head_size_of(config)
    check_head_size(head_size, device=device)
    if device == "cpu":
        return shape
    return replace(shape, slot_multiple=GpuAttention(head_size=head_size).slot_multiple)


def _groups(trees: Iterable[bytes], *, shape: ModelShape, ranks: Ranks) -> Iterable[PlannedGroup]:
    for tree in trees:
        yield planned_group(_forest(tree), shape=shape, ranks=ranks)


def _forest(tree: bytes) -> Forest:
    record = decode(MERGED_TREES, tree)
    assert isinstance(record, MergedTree)
    return read_tree(record)


if __name__ == "__main__":
    main()
