"""What the engine can take, from its own report and the model's config.json."""

import asyncio
from pathlib import Path

import msgspec

from forgemq_contracts.engine_report import ModelInfo, size_refusal, start_refusal
from forgemq_contracts.run import Model
from forgemq_inference.core.engine_limits import EngineLimits
from forgemq_inference.core.routes import Experts
from forgemq_inference.engine import EngineRefusedError, ServerInfo


class ModelFolderError(Exception):
    """The model's folder does not say what the engine's limits are."""


class _TextConfig(msgspec.Struct, frozen=True):
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    num_hidden_layers: int | None = None
    num_experts_per_tok: int | None = None


class _ModelConfig(_TextConfig, frozen=True):
    text_config: _TextConfig | None = None


async def check_engine(server: ServerInfo, info: ModelInfo, *, model: Model, url: str) -> None:
    """Refuse an engine that was started otherwise than the run needs, or has other sizes.

    Args:
        server: The engine's report.
        info: What it has loaded.
        model: Of the run.
        url: Of the engine, for the error.

    Raises:
        EngineRefusedError: names the field and what the engine has.
    """
    folders = (info.model_path, model.path)
    held, wanted = [await asyncio.to_thread(_config_in, folder) for folder in folders]
    refusal = start_refusal(server, model, url=url) or size_refusal(held, wanted, url=url)
    if refusal:
        raise EngineRefusedError(refusal)


def _config_in(folder: str) -> bytes:
    """The model's config.json; b"" if there is none on this machine."""
    try:
        return (Path(folder) / "config.json").read_bytes() if folder else b""
    except OSError:
        return b""


async def engine_limits(
    server: ServerInfo, *, model_path: str, context_tokens_max: int
) -> EngineLimits:
    """Limits for every request of the lane.

    Args:
        server: The engine's report.
        model_path: Folder with the model's config.json.
        context_tokens_max: The run's bound on context and output together.

    Raises:
        ModelFolderError: there is no config.json, or it names no vocabulary size.
    """
    path = Path(model_path) / "config.json"
    try:
        config = msgspec.json.decode(await asyncio.to_thread(path.read_bytes), type=_ModelConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelFolderError(f"{path}: {error}") from error
    text = config.text_config or config
    vocabulary_size = text.vocab_size or config.vocab_size
    if vocabulary_size is None:
        raise ModelFolderError(f"{path} names no vocab_size")
    positions = server.context_length or text.max_position_embeddings or server.max_req_input_len
    experts = None
    if text.num_experts_per_tok and text.num_hidden_layers:
        experts = Experts(layers=text.num_hidden_layers, top_k=text.num_experts_per_tok)
    return EngineLimits(
        context_tokens_max=min(positions, server.max_total_num_tokens, context_tokens_max),
        input_tokens_max=server.max_req_input_len,
        vocabulary_size=vocabulary_size,
        experts=experts,
        records_routes=server.enable_return_routed_experts,
        attention_groups=server.attn_dp_size,
    )
