"""Samples and trees for the trainer's tests, built by a plain trie that uses no product code."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from forgemq_contracts import topics
from forgemq_contracts.partitions import group_partition
from forgemq_contracts.run import LogLayout, Model, Optimizer, Queue, RunConfiguration, Trainer
from forgemq_contracts.steps import ScheduledGroup, ScheduledStep
from forgemq_contracts.trees import MergedTree
from forgemq_trainer.core.loss import Entries
from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.tree import Forest, read_tree

SHAPE = ModelShape(
    layers=2,
    hidden=32,
    query_size=32,
    key_size=16,
    mlp_size=48,
    vocabulary=64,
    value_bytes=4,
    wide_bytes=4,
)
"""Of a model of a few kilobytes, for functions of shapes alone."""


@dataclass(frozen=True)
class Sample:
    """One request and its completion, which are the tokens from `first_sampled` on."""

    tokens: tuple[int, ...]
    first_sampled: int
    advantage: float
    behaviour: tuple[float, ...]
    temperature: float = 1.0
    version: int = 0


@dataclass
class _Node:
    token: int
    parent: "_Node | None"
    children: dict[int, "_Node"] = field(default_factory=dict)
    below: int = 1
    index: int = -1


def _grow(samples: Sequence[Sample]) -> tuple[_Node, list[list[_Node]]]:
    root = _Node(-1, None)
    paths = []
    for sample in samples:
        node, path = root, []
        for token in sample.tokens:
            if token not in node.children:
                node.children[token] = _Node(token, node)
                above: _Node | None = node
                while above is not None:
                    above.below += 1
                    above = above.parent
            node = node.children[token]
            path.append(node)
        paths.append(path)
    return root, paths


def _layout(root: _Node) -> list[_Node]:
    order: list[_Node] = []
    stack = sorted(root.children.values(), key=lambda node: node.below)
    while stack:
        node = stack.pop()
        node.index = len(order)
        order.append(node)
        stack.extend(sorted(node.children.values(), key=lambda child: child.below))
    return order


def _segments(order: list[_Node], root: _Node) -> tuple[list[int], list[int], list[int]]:
    starts, parents, segment_of = [], [], {}
    for node in order:
        parent = node.parent
        assert parent is not None
        if parent is root or len(parent.children) > 1:
            starts.append(node.index)
            parents.append(-1 if parent is root else segment_of[parent.index])
        segment_of[node.index] = len(starts) - 1
    lengths = np.diff([*starts, len(order)]).tolist()
    return starts, lengths, parents


def _packed(values: object, dtype: str) -> bytes:
    return np.asarray(values, dtype=dtype).tobytes()


def merge(samples: Sequence[Sample], group_id: str = "g-0", lineage: int = 1) -> MergedTree:
    """The tree of these samples in the merger's wire form."""
    root, paths = _grow(samples)
    order = _layout(root)
    starts, lengths, parents = _segments(order, root)
    entry_token = [
        node.index
        for sample, path in zip(samples, paths, strict=True)
        for node in path[sample.first_sampled :]
    ]
    counts = [len(sample.tokens) - sample.first_sampled for sample in samples]
    versions = np.repeat([sample.version for sample in samples], counts)
    behaviour = [value for sample in samples for value in sample.behaviour]
    return MergedTree(
        group_id=group_id,
        domain="demo",
        tokens=_packed([node.token for node in order], "<i4"),
        segment_start=_packed(starts, "<i4"),
        segment_length=_packed(lengths, "<i4"),
        segment_parent=_packed(parents, "<i4"),
        entry_token=_packed(entry_token, "<i4"),
        entry_logprob=_packed(behaviour, "<f4"),
        entry_version=_packed(versions, "<i4"),
        sample_first_entry=_packed([0, *np.cumsum(counts)], "<i4"),
        sample_advantage=_packed([sample.advantage for sample in samples], "<f4"),
        sample_temperature=_packed([sample.temperature for sample in samples], "<f4"),
        sample_leaf=_packed([path[-1].index for path in paths], "<i4"),
        sample_episode=_packed(range(len(samples)), "<i4"),
        sample_turn=_packed([0] * len(samples), "<i4"),
        sample_ids=tuple(f"{number:032x}" for number in range(len(samples))),
        lineage=lineage,
    )


def routed(tree: MergedTree, *, layers: int, top_k: int, experts: int, seed: int = 1) -> MergedTree:
    """The tree with a random expert route for every token that an entry continues."""
    forest = read_tree(tree)
    generator = np.random.default_rng(seed)
    of_token = np.stack(
        [
            np.concatenate([generator.permutation(experts)[:top_k] for _ in range(layers)])
            for _ in range(forest.token_count)
        ]
    )
    routes = of_token[forest.parent_N[forest.entry_token_E]]
    return msgspec.structs.replace(tree, entry_route=routes.astype("<i2").tobytes())


def with_one_disagreement(tree: MergedTree, *, experts: int) -> MergedTree:
    """The routed tree, but one entry recorded other experts than the first of its token."""
    forest = read_tree(tree)
    sources = forest.parent_N[forest.entry_token_E]
    _, firsts = np.unique(sources, return_index=True)
    other = np.setdiff1d(np.arange(len(sources)), firsts)[0]
    routes = forest.entry_route_ER.copy()
    routes[other] = (routes[other] + 1) % experts
    return msgspec.structs.replace(tree, entry_route=routes.tobytes())


def make_sample(
    context: Sequence[int], sampled: Sequence[int], generator: np.random.Generator
) -> Sample:
    """A sample with a random advantage, behaviour, temperature and version (float32 values)."""
    behaviour = (-3.0 - 2.0 * generator.random(len(sampled))).astype(np.float32)
    return Sample(
        tokens=(*context, *sampled),
        first_sampled=len(context),
        advantage=float(np.float32(generator.normal())),
        behaviour=tuple(behaviour.tolist()),
        temperature=float(generator.choice([1.0, 0.5])),
        version=int(generator.integers(0, 3)),
    )


def line_of(length: int) -> Forest:
    """A tree of one path, with one loss entry at its end."""
    generator = np.random.default_rng(length)
    context = generator.integers(1, 60, length - 1).tolist()
    return read_tree(merge([make_sample(context, [7], generator)], f"g-{length}"))


def agent_samples(
    generator: np.random.Generator,
    *,
    rollouts: int = 3,
    turns: int = 3,
    prompt: int = 9,
    act: int = 4,
    observe: int = 5,
    is_stripped: bool = False,
    vocabulary: int = 61,
) -> list[Sample]:
    """Rollouts of one task: turns append, or drop half of their sampled tokens (reasoning)."""

    def draw(count: int) -> list[int]:
        return generator.integers(1, vocabulary, max(1, count)).tolist()

    first = draw(prompt)
    samples = []
    for _ in range(rollouts):
        history = list(first)
        for _ in range(turns):
            sampled = draw(act + int(generator.integers(0, 3)))
            samples.append(make_sample(history, sampled, generator))
            kept = sampled[len(sampled) // 2 :] if is_stripped else sampled
            history = [*history, *kept, *draw(observe)]
    return samples


def adversarial_samples(generator: np.random.Generator) -> list[Sample]:
    """A prefix of another sample, equal samples, single-token branches and a fork."""
    context = [5, 6, 7, 8]
    return [
        make_sample(context, [9, 10, 11, 12], generator),
        make_sample(context, [9, 10], generator),
        make_sample(context, [9, 10, 11, 12], generator),
        make_sample(context, [9], generator),
        make_sample(context, [13], generator),
        make_sample([*context, 9, 10], [14], generator),
        make_sample([*context, 9, 10, 11], [12, 3], generator),
        make_sample([5], [6, 7, 8], generator),
        make_sample([40, 41], [42], generator),
    ]


WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
"""Every second layer sees 7 tokens."""

of_every_kind = pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {}),
        pytest.param("llama", {}, marks=pytest.mark.slow),
        pytest.param("qwen2", {}, marks=pytest.mark.slow),
        ("qwen3_moe", {}),
        pytest.param("qwen3_moe", {"norm_topk_prob": True}, marks=pytest.mark.slow),
        pytest.param("qwen3", WINDOWS | {"use_sliding_window": True}, marks=pytest.mark.slow),
        pytest.param("mistral", {"sliding_window": None}, marks=pytest.mark.slow),
        pytest.param("mistral", {}, marks=pytest.mark.slow),
        pytest.param("minimax_m2", {}, marks=pytest.mark.slow),
        pytest.param("glm4_moe", {"use_qk_norm": True}, marks=pytest.mark.slow),
        ("gpt_oss", {}),
        pytest.param("gemma3_text", {}, marks=pytest.mark.slow),
        ("deepseek_v3", {}),
    ],
    ids=lambda value: "_".join(map(str, value)) or "as is" if isinstance(value, dict) else value,
)
"""Every supported family, as arguments of `make_model`; those not slow differ most."""

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_BIASED = {"n_group": 2, "topk_group": 1, "n_routed_experts": 4, "routed_scaling_factor": 1.5}

OF_FAMILY: dict[str, dict[str, object]] = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4} | _EXPERTS,
    "mistral": {"sliding_window": 7},
    "minimax_m2": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "rotary_dim": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "glm4_moe": _EXPERTS | _BIASED | {"first_k_dense_replace": 1, "attention_bias": True},
    "gpt_oss": WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": WINDOWS | {"query_pre_attn_scalar": 12, "tie_word_embeddings": True},
    "deepseek_v3": _EXPERTS
    | _BIASED
    | {
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
    },
}
"""What a family's tiny configuration has besides the sizes of all."""


def make_model(kind: str, dtype: torch.dtype, **changes: object) -> torch.nn.Module:
    """A tiny model of transformers with random weights."""
    sizes: dict[str, object] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.15,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(sizes | OF_FAMILY.get(kind, {}) | changes))
    model = AutoModelForCausalLM.from_config(config)
    _stir(model)  # In float32, so that every wider model has the values of a saved one.
    return model.to(dtype)


@torch.no_grad()
def _stir(model: torch.nn.Module) -> None:
    """Give what begins as 0 or 1 other values: biases, sinks and centred norms."""
    generator = torch.Generator().manual_seed(1)
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if name.endswith(("bias", "sinks", "norm.weight", "layernorm.weight")):
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)


def save_base(folder: Path, *, kind: str = "qwen3", **changes: object) -> Path:
    """Save a tiny base model in Hugging Face format, with a tokenizer file."""
    make_model(kind, torch.float32, **changes).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    return folder


def configuration_of(base: Path, **trainer: object) -> RunConfiguration:
    """A run of a few steps on the tiny model."""
    return RunConfiguration(
        run="r",
        seed=7,
        model=Model(path=str(base), dtype="float32", context_tokens_max=512),
        queues=(Queue(domain="demo", task_source="a:b", agent="a:c", groups_per_step=2, slots=4),),
        trainer=Trainer(
            **({"steps": 4, "head_chunk_tokens": 16, "checkpoint_share_max": 1.0} | trainer)
        ),
        optimizer=Optimizer(lr=1e-2, lr_final_fraction=0.5),
        log=LogLayout(group_partitions=2),
    )


def scheduled_step(
    step: int, trees: Sequence[MergedTree], *, is_last: bool = False
) -> ScheduledStep:
    """The scheduler's record of a step over these trees."""
    groups = []
    for index, tree in enumerate(trees):
        forest = read_tree(tree)
        groups.append(
            ScheduledGroup(
                group_id=tree.group_id,
                domain="demo",
                queue_index=index,
                partition=group_partition(tree.group_id, partitions=2),
                tree_sha256=hashlib.sha256(topics.encode(tree)).hexdigest(),
                tree_tokens=forest.token_count,
                loss_tokens=forest.entry_count,
                attention_pairs=forest.attention_pairs,
                version_min=0,
                staleness=step,
                request_tokens=3 * forest.token_count,
                append_tokens=2 * forest.token_count,
            )
        )
    return ScheduledStep(step=step, groups=tuple(groups), staleness_bound=9, is_last=is_last)


def reinforce(logprob: torch.Tensor, entries: Entries) -> torch.Tensor:
    """A user's loss that uses no ratio."""
    return -entries.advantage * logprob


def sample_entries(
    sample: Sample, dtype: torch.dtype, *, reference: torch.Tensor | None = None
) -> Entries:
    """The loss entries of one sample alone."""
    behaviour = torch.tensor(sample.behaviour, dtype=dtype)
    zeros = torch.zeros(len(behaviour), dtype=torch.long)
    return Entries(
        behaviour=behaviour,
        advantage=torch.full_like(behaviour, sample.advantage),
        temperature=torch.full_like(behaviour, sample.temperature),
        version=zeros,
        token=zeros,
        sample=zeros,
        group=zeros,
        sample_count=1,
        reference=reference,
    )
