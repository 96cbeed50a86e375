"""Models that a CPU trains in milliseconds, and groups of requests for them."""

from dataclasses import replace

import torch
from scaled_model import QWEN3_8B, Machine, made_model
from transformers import AutoConfig
from tree_gpu_cases import Case
from tree_ways import Ways
from tree_workloads import Shape, merged_tree, requests

from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.tree import read_tree
from forgemq_trainer.model_sizes import model_shape

HEAD_SIZE = 16
TINY = Machine(
    device=torch.device("cpu"),
    dtype=torch.float32,
    model={
        "vocab_size": 4096,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
    memory_bytes=36_000_000,
    peak_flops_per_s=1e11,
)
LARGE = replace(TINY, dtype=torch.bfloat16, model=QWEN3_8B)
CASE = Case(tree=Shape(rollouts=4, turns=4, prompt=200, act=16, observe=24), blocks_share=0.9)
WIDE = replace(
    TINY,
    model=dict(TINY.model)
    | {"hidden_size": 64, "intermediate_size": 16_384, "num_hidden_layers": 1, "vocab_size": 2048},
)
"""Gradients of its MLP's activations are larger than the head's chunk for every block length."""

SMALL_CASE = Case(tree=Shape(rollouts=2, turns=2, prompt=60, act=8, observe=12))
WIDE_CASE = Case(tree=Shape(rollouts=4, turns=2, prompt=150, act=20, observe=20), blocks_share=0.7)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.03}


def shape_of(machine: Machine, layers: int) -> ModelShape:
    config = AutoConfig.for_model("qwen3", **machine.scaled(layers))
    return model_shape(config, dtype=machine.dtype)


def ways_of(machine: Machine, case: Case, *, layers: int) -> Ways:
    samples, loaded = requests(case.tree), made_model(machine, layers=layers)
    forest = read_tree(merged_tree(samples))
    blocks = case.blocks(forest, loaded.policy.shape)
    return Ways(machine, loaded, samples, forest, blocks=blocks)
