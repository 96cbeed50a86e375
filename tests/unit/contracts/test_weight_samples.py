"""Which parameters are read back, and how engines name them."""

from forgemq_contracts.weight_buckets import TensorSpec
from forgemq_contracts.weight_samples import (
    PARAMETER_BYTES_MAX,
    is_whole,
    others,
    padding_bytes,
    parameters,
    sampled,
)


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, "float32", shape or (32, 32))


def model(layers: int) -> tuple[TensorSpec, ...]:
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
    for layer in range(layers):
        names += [
            f"model.layers.{layer}.{part}.weight"
            for part in (
                "input_layernorm",
                *(f"self_attn.{one}_proj" for one in "qkvo"),
                *(f"mlp.{one}_proj" for one in ("gate", "up", "down")),
            )
        ]
    return tuple(spec(name) for name in names)


def test_tensors_that_an_engine_holds_as_one_are_one_parameter_in_its_order() -> None:
    found = {name: [part.name for part in parts] for name, parts in parameters(model(1)).items()}
    layer = "model.layers.0."
    assert found == {
        f"{layer}input_layernorm.weight": [f"{layer}input_layernorm.weight"],
        f"{layer}mlp.down_proj.weight": [f"{layer}mlp.down_proj.weight"],
        f"{layer}mlp.gate_up_proj.weight": [
            f"{layer}mlp.gate_proj.weight",
            f"{layer}mlp.up_proj.weight",
        ],
        f"{layer}self_attn.o_proj.weight": [f"{layer}self_attn.o_proj.weight"],
        f"{layer}self_attn.qkv_proj.weight": [
            f"{layer}self_attn.{one}_proj.weight" for one in "qkv"
        ],
        "model.norm.weight": ["model.norm.weight"],
        "model.embed_tokens.weight": ["model.embed_tokens.weight"],
        "lm_head.weight": ["lm_head.weight"],
    }


def test_a_sample_is_half_norms_follows_its_key_and_has_nothing_too_large() -> None:
    tensors = (*model(12), spec("model.huge.weight", PARAMETER_BYTES_MAX // 4 + 1))
    first = sampled(tensors, key="r-1.1")
    assert first == sampled(tuple(reversed(tensors)), key="r-1.1")
    assert first != sampled(tensors, key="r-1.2")
    assert [is_whole(name) for name in first].count(True) == 2
    assert len(first) == 4
    drawn = sampled(tensors, key="r-1.1", count=1000)
    assert set(drawn) == set(parameters(tensors)) - {"model.huge.weight"}


def test_what_is_left_out_matches_every_other_name_and_none_of_the_wanted() -> None:
    """Layer 1 and layer 11 have names that begin alike."""
    tensors = model(12)
    wanted = ("model.layers.1.mlp.gate_up_proj.weight", "model.norm.weight")
    skipped = others(tensors, wanted)
    names = {*parameters(tensors)}
    names |= {"model.layers.1.mlp.experts.w13_weight", "model.layers.1.rotary_emb.inv_freq"}
    read = {name for name in names if not any(part in name for part in skipped)}
    assert read == set(wanted)
    assert "layers.11." in skipped
    assert "embed_tokens" in skipped
    assert "embed_tokens" not in others(tensors, ["model.embed_tokens.weight"])


def test_a_vocabulary_has_rows_of_zeros_up_to_a_multiple_of_64() -> None:
    def padding(name: str, rows: int) -> int:
        return padding_bytes(name, [spec(name, rows, 8)])

    assert padding("model.embed_tokens.weight", 700) == 4 * 8 * 4
    assert padding("lm_head.weight", 704) == 0
    assert padding("model.layers.0.mlp.down_proj.weight", 700) == 0
