"""A model of which SGLang would leave something out is refused before an engine starts."""

import pytest

from forgemq_launcher.core.config_fields import fields_of
from forgemq_launcher.core.engine_families import FamilyConfig, Rotary, check_family

LINEAR = Rotary(type="linear", factor=4.0)


@pytest.mark.parametrize(
    ("config", "has_gpu"),
    [
        (FamilyConfig(model_type="mistral", sliding_window=4096), False),
        (FamilyConfig(model_type="mistral"), False),
        (FamilyConfig(model_type="qwen3", sliding_window=100), False),
        (FamilyConfig(model_type="gemma3_text", sliding_window=100), False),
        (FamilyConfig(model_type="gpt_oss", sliding_window=100), True),
        (
            FamilyConfig(
                model_type="gemma3_text",
                rope_parameters=Rotary(full_attention={"rope_type": "linear", "factor": 8.0}),
            ),
            True,
        ),
        (FamilyConfig(model_type="llama", max_position_embeddings=4096), False),
        (
            FamilyConfig(model_type="llama", max_position_embeddings=1024, rope_scaling=LINEAR),
            False,
        ),
    ],
)
def test_what_the_engine_computes_is_taken(config: FamilyConfig, *, has_gpu: bool) -> None:
    check_family(config, context_tokens_max=4096, has_gpu=has_gpu)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            FamilyConfig(model_type="mistral", sliding_window=4095),
            r"^model.context_tokens_max must be at most the model's sliding_window, 4095, got 4096",
        ),
        (
            FamilyConfig(model_type="qwen3", sliding_window=100, use_sliding_window=True),
            "SGLang ignores the window of a model of type qwen3$",
        ),
        (
            FamilyConfig(model_type="qwen3", max_position_embeddings=4095),
            r"^model.context_tokens_max must be at most the model's positions, 4095 .* got 4096",
        ),
        (
            FamilyConfig(
                model_type="qwen3",
                max_position_embeddings=1024,
                rope_parameters=Rotary(rope_type="yarn", factor=4.0),
            ),
            "the model's positions, 1024 .* got 4096: SGLang starts with no longer context",
        ),
        (
            FamilyConfig(
                model_type="llama",
                max_position_embeddings=1024,
                rope_scaling=Rotary(
                    rope_type="linear", factor=4.0, original_max_position_embeddings=256
                ),
            ),
            r"the model's positions, 1024 \(max_position_embeddings in",
        ),
        (
            FamilyConfig(
                model_type="gemma3_text", max_position_embeddings=1024, rope_scaling=LINEAR
            ),
            r"the model's positions, 1024 \(max_position_embeddings in",
        ),
        (
            FamilyConfig(
                model_type="llama", max_position_embeddings=4096, max_sequence_length=2048
            ),
            r"the model's positions, 2048 \(max_sequence_length in",
        ),
        *(
            (
                FamilyConfig(model_type="gemma3_text", rope_parameters=rotary),
                r"^model.path: .* gemma3_text with a rotary scaling needs engines on GPUs",
            )
            for rotary in (
                Rotary(rope_type="linear", factor=8.0),
                Rotary(full_attention={"rope_type": "linear", "factor": 8.0}),
            )
        ),
        (FamilyConfig(model_type="gpt_oss"), r"^model.path: .* gpt_oss needs engines on GPUs"),
    ],
)
def test_what_the_engine_leaves_out_is_refused(config: FamilyConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_family(config, context_tokens_max=4096, has_gpu=False)


def test_positions_without_a_bound_are_a_number_that_is_no_int64() -> None:
    config = fields_of(b'{"model_type": "llama", "model_max_length": %d}' % 10**30, FamilyConfig)
    check_family(config, context_tokens_max=4096, has_gpu=False)


def test_a_field_that_is_null_is_as_left_out_and_one_of_another_type_is_named() -> None:
    config = b'{"model_type": "llama", "use_sliding_window": null, "sliding_window": null}'
    assert fields_of(config, FamilyConfig) == FamilyConfig(model_type="llama")
    for damaged in (b'{"sliding_window": "4k"}', b"[]", b"{"):
        with pytest.raises(ValueError, match=r"^the model's config\.json: "):
            fields_of(damaged, FamilyConfig)
    with pytest.raises(ValueError, match=r"got `str` - at `\$\.sliding_window`"):
        fields_of(b'{"sliding_window": "4k"}', FamilyConfig)
