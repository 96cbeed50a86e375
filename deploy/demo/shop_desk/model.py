"""The demo's model: a Qwen3 of 681 thousand parameters, and an initialisation that saves time."""

import math

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

# The vocabulary is padded to a multiple of this, for the matrix kernels.
VOCABULARY_STEP = 64


def small_qwen3(*, tokens: int) -> Qwen3ForCausalLM:
    """An untrained model for a tokenizer with this many tokens."""
    config = Qwen3Config(
        vocab_size=math.ceil(tokens / VOCABULARY_STEP) * VOCABULARY_STEP,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        architectures=["Qwen3ForCausalLM"],
    )
    model = Qwen3ForCausalLM(config)
    _initialise(model)
    return model


@torch.no_grad()
def _initialise(model: Qwen3ForCausalLM) -> None:
    layers = model.model.layers
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.02)
    for layer in layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.normal_(linear.weight, 0.0, 0.02 / math.sqrt(2 * len(layers)))
    _look_back(model)


@torch.no_grad()
def _look_back(model: Qwen3ForCausalLM, *, frequencies: int = 3, gain: float = 2.0) -> None:
    """Let two heads of the first layer look one and two tokens back.

    This uses a constant channel of the embedding and the phases of the rotary embedding. It is only
    an initialisation, which avoids the long plateau before induction heads form.
    """
    config = model.config
    size, half = config.head_dim, config.head_dim // 2
    attention = model.model.layers[0].self_attn
    queries, keys = attention.q_proj.weight, attention.k_proj.weight
    theta = 10000.0 ** -(torch.arange(0, size, 2).float() / size)
    pairs = torch.arange(frequencies)
    model.model.embed_tokens.weight[:, 0] = 0.08
    keys[:size, 0] = 0.0
    keys[pairs, 0] = 3.0
    for head in range(config.num_attention_heads // config.num_key_value_heads):
        row = head * size
        queries[row : row + size, 0] = 0.0
        queries[row + pairs, 0] = 3.0 * torch.cos((head + 1) * theta[:frequencies])
        queries[row + half + pairs, 0] = -3.0 * torch.sin((head + 1) * theta[:frequencies])
        attention.o_proj.weight[:, row : row + size].normal_(0.0, 0.02 / math.sqrt(size))
    attention.v_proj.weight[:size].normal_(0.0, config.hidden_size**-0.5)
    attention.v_proj.weight[:size, 0] = 0.0
    for norm in (attention.q_norm.weight, attention.k_norm.weight):
        norm[pairs] = gain
        norm[half + pairs] = gain
