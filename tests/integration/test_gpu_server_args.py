"""What SGLang makes of the engines that the launcher starts on GPUs: its own resolution of each
command line, on a machine where only the driver's answers are made up.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forgemq_contracts.draft_head import head_config, head_shape
from forgemq_launcher.upkeep.engine_servers import options_of_engines
from forgemq_sglang_cpu.adapters import EngineAdapters
from forgemq_sglang_cpu.options import EngineOptions, command_line, has_fp8_blocks, is_mixture
from forgemq_sglang_cpu.pool import EnginePool
from tests.unit.recipes.planned_recipes import RECIPES, run_of

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(300)]

PROBE = Path(__file__).with_name("gpu_server_args.py")
FORMAT = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
POOL = EnginePool(storage="file", folder="/kv", page_tokens=16)
DENSE, MIXTURE = "qwen3-4b", "qwen3-30b-a3b"
GPU = EngineOptions(has_gpu=True)
WIDE = EngineOptions(has_gpu=True, tensor_parallel=8, expert_parallel=8, attention_data_parallel=4)

KINDS: dict[str, tuple[str, EngineOptions, bool, dict[str, Any]]] = {
    "8-bit": (DENSE, GPU, True, {"fp8_gemm_runner_backend": "triton", "quantization": "fp8"}),
    "8-bit experts": (MIXTURE, GPU, True, {"moe_runner_backend": "triton"}),
    "wide": (MIXTURE, WIDE, False, {"tp_size": 8, "ep_size": 8, "dp_size": 1, "attn_dp_size": 4}),
    "pool": (
        DENSE,
        msgspec.structs.replace(GPU, pool=POOL),
        False,
        {"page_size": 16, "hicache_mem_layout": "page_first", "hicache_io_backend": "kernel"},
    ),
    "prefill with a pool": (
        DENSE,
        msgspec.structs.replace(GPU, role="prefill", pool=POOL),
        False,
        {"page_size": 16, "disaggregation_transfer_backend": "mooncake"},
    ),
    "decode": (
        DENSE,
        msgspec.structs.replace(GPU, role="decode"),
        False,
        {"disaggregation_decode_enable_radix_cache": True},
    ),
    "head": (
        DENSE,
        msgspec.structs.replace(GPU, head="head"),
        True,
        # SGLang's own bound for an engine that guesses.
        {"speculative_algorithm": "EAGLE", "max_running_requests": 48},
    ),
    "small model": (
        DENSE,
        msgspec.structs.replace(GPU, draft_model=str(RECIPES / DENSE)),
        False,
        {"speculative_algorithm": "STANDALONE"},
    ),
    "adapters": (
        DENSE,
        msgspec.structs.replace(GPU, adapters=EngineAdapters(rank=16, targets=("q_proj",))),
        False,
        {"max_loras_per_batch": 2, "lora_backend": "csgmv"},
    ),
}
"""The model's page, the engine, whether its weights are in 8-bit blocks, and what must hold."""

FOR_ALL = {
    "dtype": "bfloat16",
    "device": "cuda",
    "enable_fp32_lm_head": True,
    "disable_radix_cache": False,
    "disable_overlap_schedule": False,
    "sampling_backend": "flashinfer",
}
OWN_PAGES = {"h100": ("fa3", 1), "b200": ("trtllm_mha", 64)}
"""Attention of the GPU, and tokens of a page of K/V without a pool."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models in 8-bit blocks, and a draft head; only their configurations."""
    made = tmp_path_factory.mktemp("models")
    for name in (DENSE, MIXTURE):
        config = json.loads((RECIPES / name / "config.json").read_text())
        (made / name).mkdir()
        text = json.dumps(config | {"quantization_config": FORMAT})
        (made / name / "config.json").write_text(text)
    shape = head_shape((RECIPES / DENSE / "config.json").read_bytes())
    (made / "head").mkdir()
    (made / "head" / "config.json").write_text(json.dumps(head_config(shape)))
    return made


def command_of(model: Path, options: EngineOptions) -> list[str]:
    """What SGLang is given."""
    config = (model / "config.json").read_bytes()
    command = command_line(
        options,
        model_path=str(model),
        host="127.0.0.1",
        port=31000,
        has_experts=is_mixture(config),
        has_fp8_blocks=has_fp8_blocks(config),
    )
    return command[3:]


def resolved(gpu: str, commands: list[list[str]]) -> list[dict[str, Any]]:
    """SGLang's options of each command line, on this kind of GPU."""
    done = subprocess.run(
        [sys.executable, str(PROBE), gpu],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def recipe_commands() -> list[list[str]]:
    """One engine of each recipe."""
    commands = []
    for file in sorted(RECIPES.glob("*/*.toml")):
        run = run_of(f"{file.parent.name}/{file.name}")
        environ = {"FORGEMQ_TRAINER_DEVICE": "cuda"}
        options, *_ = options_of_engines(run, gpus=56, environ=environ)
        commands.append(command_of(file.parent, options))
    return commands


@pytest.mark.parametrize("gpu", list(OWN_PAGES))
def test_sglang_takes_every_engine_on_gpus_and_keeps_what_forgemq_counts_on(
    folder: Path, gpu: str
) -> None:
    """Every kind of engine, and those of each recipe."""
    commands = recipe_commands()
    recipes = len(commands)
    for model, options, is_fp8, _ in KINDS.values():
        own = msgspec.structs.replace(options, head=str(folder / "head") if options.head else "")
        commands.append(command_of((folder if is_fp8 else RECIPES) / model, own))
    found = resolved(gpu, commands)
    for (name, (*_, expected)), taken in zip(KINDS.items(), found[recipes:], strict=True):
        wanted = FOR_ALL | expected
        assert {key: taken[key] for key in wanted} == wanted, name
    attention, page = OWN_PAGES[gpu]
    for taken in found[:recipes]:
        is_mixed = DENSE not in taken["model_path"]
        wanted = FOR_ALL | {
            "attention_backend": attention,
            "page_size": page,
            "enable_return_routed_experts": is_mixed,
            "moe_runner_backend": "triton" if is_mixed else "auto",
        }
        assert {key: taken[key] for key in wanted} == wanted, taken["model_path"]
