"""Sizes of a model, from its configuration in transformers or from its modules."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from forgemq_trainer.core.layer_parts import NORMS_KEPT, LatentShape, LayerParts, Windows
from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.traffic import GatheredValues
from forgemq_trainer.model_config import EXPERT_COUNTS

SIGMOID_ROUTERS = ("deepseek_v3", "glm4_moe", "minimax_m2")
HEAD_NORMS = ("gemma3_text", "minimax_m2", "qwen3", "qwen3_moe")

GEMMA_NORMS_KEPT = 6
"""Four norms: inputs of all, and outputs of the two before attention and MLP."""

OTHER_MLPS_KEPT = {"gemma3_text": 4, "gpt_oss": 7}
"""Gemma: gate, its activation, up, product. gpt-oss: gate and up before they are clamped; the gate
after, its sigmoid and their product; up plus 1; the product of both."""


def model_shape(config: object, *, dtype: torch.dtype) -> ModelShape:
    """Sizes of a model, from its configuration in transformers."""
    settings: Any = config
    kind = str(settings.model_type)
    size = _sizes_of(config)
    experts = size("num_experts_per_tok")
    expert_size = size("moe_intermediate_size", size("intermediate_size"))
    head_size = head_size_of(config)
    wide = torch.promote_types(dtype, torch.float32)
    return ModelShape(
        layers=size("num_hidden_layers"),
        hidden=size("hidden_size"),
        query_size=size("num_attention_heads") * head_size,
        key_size=key_heads_of(config) * head_size,
        query_heads=size("num_attention_heads"),
        mlp_size=experts * expert_size if experts else size("intermediate_size"),
        vocabulary=size("vocab_size"),
        value_bytes=dtype.itemsize,
        wide_bytes=wide.itemsize,
        is_head_normed=kind in HEAD_NORMS or bool(getattr(config, "use_qk_norm", False)),
        experts=expert_count(config) if experts else 0,
        experts_per_token=experts,
        is_head_tied=bool(getattr(config, "tie_word_embeddings", False)),
        parts=LayerParts(
            norms_kept=GEMMA_NORMS_KEPT if kind == "gemma3_text" else NORMS_KEPT,
            mlp_kept=OTHER_MLPS_KEPT.get(kind),
            dense_layers=size("first_k_dense_replace") if experts else 0,
            dense_mlp_size=size("intermediate_size"),
            shared_mlp_size=size("n_shared_experts") * expert_size if experts else 0,
            is_router_wide=kind in SIGMOID_ROUTERS,
            latent=latent_shape(config),
            windows=windows_of(config),
        ),
    )


def head_size_of(config: object) -> int:
    """Size of one head's queries and keys."""
    size = _sizes_of(config)
    if size("kv_lora_rank"):
        return size("qk_nope_head_dim") + size("qk_rope_head_dim")
    return size("head_dim", size("hidden_size") // size("num_attention_heads"))


def key_heads_of(config: object) -> int:
    """Number of key/value heads, as attention has them."""
    size = _sizes_of(config)
    # Latent keys are expanded to one for each query head, whatever the configuration names.
    heads = size("num_attention_heads")
    return heads if size("kv_lora_rank") else size("num_key_value_heads", heads)


def latent_shape(config: object) -> LatentShape | None:
    """Sizes of attention with latent keys; None for every other."""
    size = _sizes_of(config)
    if not size("kv_lora_rank"):
        return None
    return LatentShape(
        heads=size("num_attention_heads"),
        query_rank=size("q_lora_rank"),
        key_rank=size("kv_lora_rank"),
        plain_size=size("qk_nope_head_dim"),
        rotary_size=size("qk_rope_head_dim"),
        value_size=size("v_head_dim"),
    )


def windows_of(config: object) -> Windows | None:
    """The windows of a model's layers; None if every layer sees all ancestors."""
    settings: Any = config
    window = getattr(config, "sliding_window", None)
    if window is None:
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return Windows(size=int(window), layers=int(settings.num_hidden_layers))
    count = sum(kind == "sliding_attention" for kind in kinds)
    return Windows(size=int(window), layers=count) if count else None


def _sizes_of(config: object) -> Callable[..., int]:
    def size(name: str, default: int = 0) -> int:
        return int(getattr(config, name, None) or default)

    return size


def expert_count(config: object) -> int:
    """Experts of a layer, by the name that the family gives their number; 0 in a dense model."""
    for name in EXPERT_COUNTS:
        if count := getattr(config, name, None):
            return int(count)
    return 0


def gathered_values(model: Any, *, shards: int, expert_ranks: int = 1) -> GatheredValues:  # noqa: ANN401  # transformers' model
    """Values of a model's parameters as ranks gather them, each in shards of equal rows.

    Args:
        model: Whole, or sharded.
        shards: Ranks that hold it once.
        expert_ranks: Of them, those that hold each layer's experts between them.
    """
    decoder = model.get_decoder()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    named = model.named_parameters()
    spread = {id(each) for name, each in named if expert_ranks > 1 and ".experts." in name}

    def count(parameters: Iterable[nn.Parameter]) -> int:
        return sum(
            math.prod((-(-len(each) // shards) * shards, *each.shape[1:]))
            for each in parameters
            if id(each) not in spread
        )

    experts = [each for each in model.parameters() if id(each) in spread]
    layers = count(decoder.layers.parameters())
    own_head = 0 if head.weight is embedding.weight else count(head.parameters())
    return GatheredValues(
        layers=layers,
        root=count(decoder.parameters()) - layers,
        head=own_head,
        trained=count(each for each in model.parameters() if each.requires_grad),
        experts=sum(each.numel() for each in experts) // expert_ranks,
        trained_experts=sum(each.numel() for each in experts if each.requires_grad) // expert_ranks,
        holders=shards // expert_ranks,
        ends=count(embedding.parameters()) + own_head,
    )
