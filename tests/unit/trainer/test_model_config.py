"""What is refused of a model's config.json before its weights are read."""

import json
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoConfig

from forgemq_contracts.trainer_plan import AskedModel, RefusedPlan
from forgemq_trainer.families import UnsupportedModelError, check_expert_rows, check_supported
from forgemq_trainer.model import DTYPES, load_model
from forgemq_trainer.model_config import ModelConfigError, check_sizes, read_model_config
from forgemq_trainer.plan import answer
from tests.unit.trainer.scene import make_model, save_base

LEFT_OUT = object()


def _changed(folder: Path, **changes: object) -> Path:
    """The tiny base model with these fields of its config.json in place of its own."""
    save_base(folder, kind="qwen3")
    file = folder / "config.json"
    values = json.loads(file.read_bytes()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not LEFT_OUT}))
    return folder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"model_type": "nope"},
            "model_type must be a family of the installed transformers, got 'nope'",
        ),
        (
            {"model_type": LEFT_OUT},
            "model_type must be a family of the installed transformers, got None",
        ),
        ({"hidden_size": "32"}, "Field 'hidden_size' expected int, got str"),
        ({"rms_norm_eps": None}, "Field 'rms_norm_eps' expected float, got NoneType"),
        ({"layer_types": ["full_attention"]}, "must be equal to the number of `layer_types`"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads, got 3"),
        ({"pad_token_id": 64}, "pad_token_id must be less than vocab_size, which is 64, or left"),
    ],
)
def test_a_config_that_no_model_can_be_made_of_is_refused_and_says_why(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    """As a setting that no restart can cure; a plan of the same file gives the same reason."""
    folder = _changed(tmp_path / "model", **changes)
    with pytest.raises(ModelConfigError, match=reason):
        load_model(folder, dtype="float32")
    planned = answer(AskedModel(config=(folder / "config.json").read_bytes()))
    assert isinstance(planned, RefusedPlan)
    assert reason in planned.reason


def test_a_division_by_zero_in_a_familys_class_is_refused_too(tmp_path: Path) -> None:
    """Of a llama whose head size follows from its number of heads."""
    file = save_base(tmp_path, kind="llama") / "config.json"
    values = json.loads(file.read_bytes()) | {"num_attention_heads": 0}
    file.write_text(json.dumps({name: v for name, v in values.items() if name != "head_dim"}))
    with pytest.raises(ModelConfigError, match="by zero"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("kinds", [None, ["full_attention"] * 2])
def test_a_mistral_that_transformers_takes_for_another_family_is_refused(
    tmp_path: Path, kinds: list[str] | None
) -> None:
    """Ministral 8B is of type mistral, with `layer_types`; mistral's class would ignore them."""
    file = save_base(tmp_path, kind="mistral") / "config.json"
    read_model_config(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"layer_types": kinds}))
    assert AutoConfig.from_pretrained(tmp_path).model_type == "ministral"
    with pytest.raises(ModelConfigError, match="layer_types must be left out in a model of type"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gemma3", "its text model alone, saved as gemma3_text, is supported"),
        ("qwen3_vl", "no test compares this family with per-request training"),
        ("t5", "no test compares this family with per-request training"),
    ],
)
def test_a_plan_of_a_model_without_the_sizes_of_a_decoder_names_its_family(
    kind: str, reason: str
) -> None:
    planned = answer(AskedModel(config=json.dumps({"model_type": kind}).encode()))
    assert isinstance(planned, RefusedPlan)
    assert planned.reason.startswith(f"model_type {kind!r} is not supported for tree training: ")
    assert reason in planned.reason


def test_text_that_is_no_config_is_refused(tmp_path: Path) -> None:
    folder = _changed(tmp_path / "model")
    for text in ("", "{", "[]", "null", '{"model_type": ["qwen3"]}'):
        (folder / "config.json").write_text(text)
        with pytest.raises(
            ModelConfigError, match=r"config\.json: (not JSON|model_type)"
        ) as raised:
            read_model_config(folder)
        planned = answer(AskedModel(config=text.encode()))
        assert isinstance(planned, RefusedPlan)
        assert str(raised.value) == f"{folder / 'config.json'}: {planned.reason}"
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        read_model_config(folder)


def test_code_of_a_model_is_neither_run_nor_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = {"auto_map": {"AutoConfig": "configuration_other.Other"}}
    folder = _changed(tmp_path / "model", model_type="other", **code)
    (folder / "configuration_other.py").write_text("raise SystemExit('the code has run')")
    with pytest.raises(ModelConfigError, match="is never run"):
        read_model_config(folder)
    assert "[y/N]" not in capsys.readouterr().out
    assert not any("configuration_other" in name for name in sys.modules)
    # With a family that transformers has, its own class is used.
    known = read_model_config(_changed(tmp_path / "known", **code))
    assert type(known).__module__.startswith("transformers.")


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 5}, "must be 1 to num_experts, which is 4, got 5"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "must be 1 to num_experts, which is 4, got 0"),
        ("qwen3_moe", {"num_experts": 0}, "must be 1 to num_experts, which is 0, got 2"),
        ("gpt_oss", {"num_experts_per_tok": -1}, "must be 1 to num_experts, which is 4, got -1"),
        ("llama", {"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ("llama", {"num_key_value_heads": 3}, "must divide num_attention_heads, got 3 and 4"),
        ("deepseek_v3", {"head_dim": 8}, "head_dim must be qk_rope_head_dim, which is 4, or left"),
        ("deepseek_v3", {"qk_rope_head_dim": 3}, "qk_rope_head_dim must be even, got 3"),
        ("deepseek_v3", {"qk_nope_head_dim": 0}, "qk_nope_head_dim must be at least 1, got 0"),
        ("deepseek_v3", {"v_head_dim": 0}, "v_head_dim must be at least 1, got 0"),
        ("deepseek_v3", {"v_head_dim": 13}, "at most qk_nope_head_dim .*, which is 12, got 13"),
        ("deepseek_v3", {"n_group": None}, "n_group and topk_group must be at least 1, got None"),
        ("deepseek_v3", {"topk_group": None}, "n_group and topk_group must be .* got 2 and None"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window must be at least 1 .* got None"),
        (
            "gpt_oss",
            {"sliding_window": None, "layer_types": ["full_attention"] * 2},
            "sliding_window must be at least 1 with such layer_types, got None",
        ),
        ("deepseek_v3", {"n_group": 3}, "n_group must divide n_routed_experts, which is 4, got 3"),
        ("deepseek_v3", {"topk_group": 0}, "topk_group must be 1 to n_group, which is 2, got 0"),
        ("glm4_moe", {"topk_group": 3}, "topk_group must be 1 to n_group, which is 2, got 3"),
        ("glm4_moe", {"n_group": 4}, "n_group must be at most half of n_routed_experts, .* got 4"),
        ("glm4_moe", {"num_experts_per_tok": 3}, "at most the 2 experts of topk_group groups"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(
    kind: str, changes: dict[str, object], reason: str
) -> None:
    config = make_model(kind, torch.float32).config
    check_supported(config)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ModelConfigError, match=reason):
        check_supported(config)


@pytest.mark.parametrize(
    ("kind", "dtype", "changes", "reason"),
    [
        ("qwen3_moe", "bfloat16", {"moe_intermediate_size": 20}, "moe_.* multiple of 8 .* got 20"),
        ("qwen3_moe", "bfloat16", {"hidden_size": 36}, "hidden_size must be a multiple of 8 .* 36"),
        ("qwen3_moe", "float32", {"hidden_size": 38}, "hidden_size must be a multiple of 4 .* 38"),
        ("gpt_oss", "bfloat16", {"intermediate_size": 44}, "intermediate_size must .* 8 .* got 44"),
    ],
)
def test_experts_whose_rows_torch_does_not_multiply_are_refused_at_load(
    tmp_path: Path,
    kind: str,
    dtype: Literal["float32", "bfloat16"],
    changes: dict[str, object],
    reason: str,
) -> None:
    save_base(tmp_path, kind=kind, **changes)
    with pytest.raises(UnsupportedModelError, match=f"^{reason}"):
        load_model(tmp_path, dtype=dtype)


@pytest.mark.parametrize(
    ("kind", "dtype", "changes"),
    [
        ("qwen3_moe", "float32", {"moe_intermediate_size": 20}),
        ("glm4_moe", "bfloat16", {"intermediate_size": 21}),  # Of its dense layer.
        ("qwen3", "bfloat16", {"intermediate_size": 21}),
    ],
)
def test_other_rows_are_taken(kind: str, dtype: str, changes: dict[str, object]) -> None:
    model = make_model(kind, DTYPES[dtype], **changes)
    check_expert_rows(model.config, dtype=DTYPES[dtype])
    logits = model(input_ids=torch.arange(5)[None], use_cache=False).logits
    assert torch.isfinite(logits).all()


def test_a_family_without_these_sizes_passes() -> None:
    check_sizes(AutoConfig.for_model("mamba2"))
