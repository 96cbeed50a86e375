"""Accepted and refused models, and the modules that replace those of transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from forgemq_contracts.model_families import MODEL_TYPES
from forgemq_trainer.core.attention.attention import BlockKeys, TreeAttention, attention_interface
from forgemq_trainer.core.attention.cpu_attention import CpuAttention
from forgemq_trainer.core.attention.plan import AttentionPlan
from forgemq_trainer.core.precision import PRECISE, RmsNorm, RotaryAngles, make_precise
from forgemq_trainer.core.routers import ROUTERS
from forgemq_trainer.families import UnsupportedModelError, check_head_size, check_supported
from forgemq_trainer.model import load_model, prepare
from forgemq_trainer.storage.weights import write_weights
from tests.unit.trainer.scene import make_model, of_every_kind, save_base

ROUTER_COUNTS = {"qwen3_moe": 2, "minimax_m2": 2, "gpt_oss": 2, "glm4_moe": 1, "deepseek_v3": 1}
"""Of the tiny models; the last two have a dense layer before the one with experts."""


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("qwen3_next", {}, "model_type 'qwen3_next' is not supported .* linear attention"),
        ("qwen3_5_text", {}, "model_type 'qwen3_5_text' is not .* would have to be kept at every"),
        ("mamba2", {}, "model_type 'mamba2' is not supported .* a recurrent state"),
        ("gemma2", {}, "model_type 'gemma2' is not supported .* caps the scores"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping must be off"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be off"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention must"),
        ("qwen3", {"is_causal": False}, "is_causal must be true, got false"),
        ("minimax_m2", {"router_jitter_noise": 0.1}, "router_jitter_noise must be off"),
        ("llama", {"layer_types": ["chunked_attention"] * 32}, "layer_types must be of .* chunked"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type dynamic depends on the sequence",
        ),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout must be 0"),
        ("qwen3", {"attention_dropout": 0.1}, "attention_dropout must be 0"),
        ("qwen3_moe", {"output_router_logits": True}, "output_router_logits must be off"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers must be empty, got \[0\]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step must be 1, got 2"),
        (
            "qwen2",
            {"dual_chunk_attention_config": {"chunk_size": 8}},
            "attention_config must be off",
        ),
    ],
)
def test_a_setting_that_rules_out_exact_training_is_refused_by_name(
    kind: str, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        check_supported(AutoConfig.for_model(kind, **changes))


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        (
            "lfm2",
            {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
            "got conv; Lfm2ShortConv: a state or",
        ),
        ("granite", {"logits_scaling": 8.0}, "it contains: logits_scaling must be 1, got 8.0"),
        ("olmo2", {"num_hidden_layers": 1}, "no test compares .* qwen3_moe$"),
        ("mixtral", {"num_hidden_layers": 1}, "no test compares it with per-request training"),
        ("ministral", {}, "contains: no causal language model: unsupported operand"),
    ],
)
def test_a_family_without_a_test_is_refused_with_what_it_contains(
    kind: str, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        check_supported(AutoConfig.for_model(kind, **changes))


@pytest.mark.parametrize("module", [torch.nn.Conv1d(4, 4, 2), torch.nn.Dropout(0.1)])
def test_a_supported_family_with_an_inexact_module_is_refused(module: torch.nn.Module) -> None:
    model = make_model("llama", torch.float32)
    model.get_submodule("model.layers.1.mlp").add_module("further", module)
    name = type(module).__name__
    with pytest.raises(UnsupportedModelError, match=rf"{name}.*\(model.layers.1.mlp.further\)"):
        prepare(model)


def test_a_cap_that_attention_would_ignore_is_refused_by_name() -> None:
    one = torch.zeros(1, 1, 1, 4)
    plan = AttentionPlan(start=0, end=1, triangles=((0, 1),), rectangles=())
    keys = BlockKeys(
        plan=plan,
        carries=(),
        subtree_end_S=np.ones(1, dtype=np.int64),
        position_S=np.zeros(1, dtype=np.int64),
    )
    attend = CpuAttention().of_run(keys, dtype=one.dtype, device=one.device)
    with pytest.raises(ValueError, match="tree attention takes no softcap, got 8"):
        attention_interface(
            torch.nn.Module(),
            one,
            one,
            one,
            None,
            tree_attention=TreeAttention(attend=attend),
            softcap=8,
        )


def test_head_sizes_that_a_gpu_has_no_kernel_for_are_refused_there_only() -> None:
    for size in (8, 264):
        with pytest.raises(UnsupportedModelError, match=f"head_dim is {size}; attention on a GPU"):
            check_head_size(size, device="cuda")
        check_head_size(size, device="cpu")
    check_head_size(16, device="cuda")
    check_head_size(256, device="cuda")


def test_a_rotary_type_that_depends_on_the_sequence_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = make_model("llama", torch.float32, rope_parameters=rope)
    with pytest.raises(ValueError, match="rope_type dynamic depends on the sequence"):
        make_precise(model)


@of_every_kind
def test_every_norm_rotary_embedding_and_router_is_ours(
    kind: str, changes: dict[str, object]
) -> None:
    model = make_model(kind, torch.float32, **changes)
    names = dict(model.named_parameters())
    tokens = torch.arange(1, 30)[None]
    model.set_attn_implementation("eager" if kind == "gpt_oss" else "sdpa")
    before = model(input_ids=tokens, use_cache=False).logits
    make_precise(model)
    after = model(input_ids=tokens, use_cache=False).logits
    assert torch.allclose(before, after, atol=1e-5)
    kinds = [type(module).__name__ for module in model.modules()]
    assert not [name for name in kinds if name.endswith(("RMSNorm", "RotaryEmbedding"))]
    assert kinds.count(RmsNorm.__name__) >= 5
    assert kinds.count(RotaryAngles.__name__) == (2 if kind == "gemma3_text" else 1)
    routers = sum(isinstance(module, ROUTERS) for module in model.modules())
    assert routers == ROUTER_COUNTS.get(kind, 0)
    assert {name: id(p) for name, p in model.named_parameters()} == {
        name: id(p) for name, p in names.items()
    }


@pytest.mark.parametrize("is_normalised", [False, True], ids=["as chosen", "normalised"])
def test_routing_weights_of_a_bfloat16_model_are_those_of_a_float32_router(
    *, is_normalised: bool
) -> None:
    """And each expert's output is multiplied by them before it is rounded."""
    model = make_model("qwen3_moe", torch.bfloat16, norm_topk_prob=is_normalised)
    make_precise(model)
    block = model.get_submodule("model.layers.0.mlp")
    router, experts = block.get_submodule("gate"), block.get_submodule("experts")
    torch.manual_seed(1)
    hidden = torch.randn(40, 32, dtype=torch.bfloat16)
    logits, weights, chosen = router(hidden)
    shares = logits.float().softmax(-1)
    expected, best = shares.topk(2)
    if is_normalised:
        expected = expected / expected.sum(-1, keepdim=True)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, expected)
    assert torch.equal(chosen, best)
    ones = torch.ones(40, 1)
    each = [experts(hidden, chosen[:, [k]], ones).float() for k in (0, 1)]
    total = weights[:, [0]] * each[0] + weights[:, [1]] * each[1]
    assert torch.equal(block(hidden[None])[0], total.to(torch.bfloat16))


def test_modules_that_are_precise_already_stay() -> None:
    model = make_model("qwen3_moe", torch.float32, norm_topk_prob=True)
    make_precise(model)
    before = {name: id(m) for name, m in model.named_modules() if isinstance(m, PRECISE)}
    routers = prepare(model).policy.routers
    after = {name: id(m) for name, m in model.named_modules() if isinstance(m, PRECISE)}
    assert after == before
    assert [router.is_normalised for router in routers] == [True, True]


def test_a_loaded_model_has_the_asked_dtype_and_its_tied_head(tmp_path: Path) -> None:
    loaded = load_model(save_base(tmp_path / "base"), dtype="bfloat16")
    parameters = dict(loaded.model.named_parameters())
    assert {parameter.dtype for parameter in parameters.values()} == {torch.bfloat16}
    assert loaded.policy.head_VH is parameters["model.embed_tokens.weight"]
    assert loaded.policy.shape.value_bytes == 2
    assert loaded.policy.shape.wide_bytes == 4


def test_a_stock_forward_without_a_plan_is_an_error_and_not_a_causal_mask() -> None:
    model = prepare(make_model("qwen3", torch.float32)).model
    with pytest.raises(TypeError, match="tree_attention"):
        model(input_ids=torch.arange(1, 9)[None])


def test_shapes_follow_the_configuration() -> None:
    dense = prepare(make_model("llama", torch.float32, head_dim=16)).policy.shape
    assert (dense.query_size, dense.key_size, dense.mlp_size) == (64, 32, 48)
    assert (dense.is_head_tied, dense.slot_multiple) == (False, 1)
    assert prepare(make_model("qwen3", torch.float32)).policy.shape.is_head_tied
    sparse = prepare(make_model("qwen3_moe", torch.float32)).policy.shape
    assert sparse.mlp_size == 2 * 24


def test_a_base_model_in_shards_loads_to_the_same_parameters(tmp_path: Path) -> None:
    model = make_model("qwen3", torch.float32)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert not (tmp_path / "shards" / "model.safetensors").exists()
    whole, shards = (
        load_model(tmp_path / name, dtype="float32").model.state_dict()
        for name in ("whole", "shards")
    )
    assert whole.keys() == shards.keys()
    assert all(torch.equal(whole[name], shards[name]) for name in whole)


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_written_weights_have_the_names_and_bytes_that_were_loaded(
    kind: str, tmp_path: Path
) -> None:
    """A layer's experts are one tensor in memory, and one tensor each in the file."""
    make_model(kind, torch.float32).save_pretrained(tmp_path / "base")
    loaded = load_model(tmp_path / "base", dtype="float32")
    written = write_weights(
        loaded.model, base=tmp_path / "base", dtype="float32", folder=tmp_path / "written"
    )
    base = load_file(tmp_path / "base" / "model.safetensors")
    saved = load_file(written.folder / "model.safetensors")
    assert base.keys() == saved.keys()
    assert all(torch.equal(base[name], saved[name]) for name in base)
    if kind == "qwen3_moe":
        assert "model.layers.0.mlp.experts.3.down_proj.weight" in saved
