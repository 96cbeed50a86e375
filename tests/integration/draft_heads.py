"""Draft heads for tests: random ones, and one that knows a few continuations by heart."""

import base64
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.draft_head import HEAD_FILE
from forgemq_contracts.weights import RelayedLane
from forgemq_inference.head_payloads import head_payloads
from forgemq_launcher.commands.new_head import write_new_head
from tests.engine_fixture import engine_post, processes_of
from tests.lane_scene import LaneScene
from tests.relay_sender import relay

STEPS = 150
"""Enough for a head of 230,000 numbers to learn 240 tokens by heart."""


class Head(nn.Module):
    """What SGLang's LlamaForCausalLMEagle computes, without its attention to a cache."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        config = LlamaConfig.from_pretrained(folder)
        config._attn_implementation = "sdpa"
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.layers[0].input_layernorm = nn.Identity()
        self.rotary = LlamaRotaryEmbedding(config)
        self.load_state_dict(load_file(folder / HEAD_FILE), strict=False)

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        mixed = self.fc(torch.cat((embedded, states), -1))
        places = torch.arange(mixed.shape[1]).unsqueeze(0)
        rotations = self.rotary(mixed, places)
        made = self.layers[0](mixed, position_embeddings=rotations, position_ids=places)
        return made[0] if isinstance(made, tuple) else made


def fitted_head(model: Path, folder: Path, *, contexts: list[list[int]], tokens: int) -> Path:
    """A head that guesses the greedy continuations of these contexts."""
    write_new_head(model, folder, seed=7)
    torch.manual_seed(7)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        ids = policy.generate(
            torch.tensor(contexts),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
        )
        states = policy.model(ids).last_hidden_state
        embedded = policy.model.embed_tokens(ids)
        likely = policy.lm_head(states).argmax(-1)
    head = Head(folder)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(STEPS):
        once = head(embedded[:, 1:], states[:, :-1])
        # What follows a guess is guessed from the head's own state.
        twice = head(embedded[:, 2:], once[:, :-1])
        loss = sum(
            functional.cross_entropy(policy.lm_head(guess).flatten(0, 1), wanted.flatten())
            for guess, wanted in ((once, likely[:, 1:]), (twice, likely[:, 2:]))
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    kept = {name: value.detach().contiguous() for name, value in head.state_dict().items()}
    save_file({name: kept[name] for name in sorted(kept)}, folder / HEAD_FILE)
    return folder


def reset_head(url: str, head: Path) -> None:
    """Bring the draft of an engine that guesses back to a head's weights."""
    post, processes = engine_post(url), processes_of(url)
    post("/begin_weight_update", {"selector": "draft"}, (200,))
    for payload in head_payloads(head):
        text = base64.b64encode(payload).decode()
        body = {
            "serialized_named_tensors": [text] * processes,
            "selector": "draft",
            "flush_cache": False,
        }
        post("/update_weights_from_tensor", body, (200,))
    post("/end_weight_update", {}, (200,))


def acceptance(records: Sequence[FinishedCompletion]) -> float:
    """Tokens a pass over drafted ones gave; a prefill gives the first one without."""
    tokens = sum(len(record.output) // 4 - 1 for record in records)
    return tokens / sum(record.verifications for record in records)


async def relay_and_lose(
    scene: LaneScene, policy: Path, head: Path | None, *, version: int, folder: Path
) -> None:
    """Relay copies to the lane and publish them; then they are gone, so nothing else can be loaded.

    Args:
        scene: Serves lane 0.
        policy: A model's folder.
        head: A head's, or None for a version without one.
        version: To publish.
        folder: For the copies; it does not exist.
    """
    copies = [
        Path(shutil.copytree(source, folder / name))
        for name, source in (("policy", policy), ("head", head))
        if source is not None
    ]
    copied_head = copies[1] if head else None
    address = (await scene.report(is_serving=True)).weights_address
    relayed = await relay(copies[0], [address], version=version, head=copied_head)
    assert (relayed.lane, relayed.left_out) == (0, {})
    to_us = (RelayedLane(lane=0, epoch=1),)
    await scene.publish(copies[0], version=version, head=copied_head, relayed_to=to_us)
    shutil.rmtree(folder)
