"""The draft head on disk: one layer that guesses the policy's next token from the policy's state.

A head is a folder with `config.json` and `model.safetensors`, in the format of SGLang's class
`LlamaForCausalLMEagle`. Its input at position t is the embedding of token t + 1, then the policy's
state at t after its last norm, side by side: `fc` maps the two, of `hidden_size` each, to one. What
follows is one layer of Llama without the norm before its attention. Its output, without a last
norm, goes through the policy's own language-model head, and is the state for the next guess.
Embedding and language-model head are the policy's, and are not in the file.

A new head's matrices are uniform within 1 / sqrt(columns), its norm is 1 and its bias is 0.
"""

import math
from typing import Any

import msgspec
from msgspec import Struct

HEAD_CLASS = "LlamaForCausalLMEagle"
HEAD_FILE = "model.safetensors"


class _Rope(Struct, frozen=True):
    rope_theta: float | None = None


class _TextConfig(Struct, frozen=True):
    hidden_size: int = 0
    num_attention_heads: int = 0
    vocab_size: int = 0
    intermediate_size: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_parameters: _Rope | None = None


class _ModelConfig(_TextConfig, frozen=True):
    architectures: tuple[str, ...] = ()
    text_config: _TextConfig | None = None


class HeadShape(Struct, frozen=True, kw_only=True):
    """The sizes of a head; those of the policy's own layers, so that both share a K/V cache.

    Attributes:
        hidden_size: Of the policy's state.
        intermediate_size: Of the layer between its two norms.
        attention_heads: Of queries.
        kv_heads: Of keys and values.
        head_dim: Of one of them.
        vocabulary_size: Tokens of the policy.
        positions_max: Longest context.
        norm_epsilon: Of the norm.
        rope_theta: Base of the rotary positions.
    """

    hidden_size: int
    intermediate_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    vocabulary_size: int
    positions_max: int
    norm_epsilon: float
    rope_theta: float


def head_shape(config: bytes) -> HeadShape:
    """The shape in a `config.json`: of a head, or of the head that a model gets.

    Raises:
        ValueError: a size is missing.
    """
    try:
        model = msgspec.json.decode(config, type=_ModelConfig)
    except msgspec.MsgspecError as error:
        raise ValueError(f"config.json: {error}") from error
    text = model.text_config or model
    for name in ("hidden_size", "num_attention_heads", "vocab_size"):
        if getattr(text, name) < 1:
            raise ValueError(f"config.json names no {name}")
    rope = text.rope_parameters or _Rope()
    return HeadShape(
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size or 4 * text.hidden_size,
        attention_heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads or text.num_attention_heads,
        head_dim=text.head_dim or text.hidden_size // text.num_attention_heads,
        vocabulary_size=text.vocab_size,
        positions_max=text.max_position_embeddings,
        norm_epsilon=text.rms_norm_eps,
        rope_theta=text.rope_theta or rope.rope_theta or 10_000.0,
    )


def is_head(config: bytes) -> bool:
    """Whether a `config.json` is that of a draft head."""
    try:
        return msgspec.json.decode(config, type=_ModelConfig).architectures == (HEAD_CLASS,)
    except msgspec.MsgspecError:
        return False


def head_config(shape: HeadShape) -> dict[str, Any]:
    """What a head's `config.json` holds."""
    return {
        "architectures": [HEAD_CLASS],
        "model_type": "llama",
        "attention_bias": False,
        "dtype": "float32",
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.positions_max,
        "num_attention_heads": shape.attention_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocabulary_size,
    }


def head_tensors(shape: HeadShape) -> dict[str, tuple[int, ...]]:
    """Shapes of a head's tensors by name, sorted by name as in its file."""
    hidden, between = shape.hidden_size, shape.intermediate_size
    queries = shape.attention_heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    return {
        "fc.bias": (hidden,),
        "fc.weight": (hidden, 2 * hidden),
        "layers.0.mlp.down_proj.weight": (hidden, between),
        "layers.0.mlp.gate_proj.weight": (between, hidden),
        "layers.0.mlp.up_proj.weight": (between, hidden),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.self_attn.k_proj.weight": (keys, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, queries),
        "layers.0.self_attn.q_proj.weight": (queries, hidden),
        "layers.0.self_attn.v_proj.weight": (keys, hidden),
    }


def bound_of_new(shape: tuple[int, ...]) -> float:
    """Largest absolute value in a new head's matrix of this shape."""
    return 1 / math.sqrt(shape[-1])
