"""What ForgeMQ names of SGLang is there: flags of every kind of engine, and what hooks take.

SGLang's own parser reads the command lines, also where no GPU is.
"""

import argparse
import pkgutil
from collections.abc import Iterator

import pytest

from forgemq_contracts.episodes import STOP_STRINGS_MAX
from forgemq_contracts.lane_engines import LaneEngines, check_lanes
from forgemq_sglang_cpu import plugin
from forgemq_sglang_cpu.adapters import EngineAdapters
from forgemq_sglang_cpu.options import EngineOptions, command_line
from forgemq_sglang_cpu.pool import EnginePool

pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.timeout(300),
    # SGLang's modules warn of what a machine without an accelerator lacks.
    pytest.mark.filterwarnings("ignore"),
]

WIDE = EngineOptions(
    has_gpu=True, tensor_parallel=8, expert_parallel=8, attention_data_parallel=4, gpu_first=2
)
MOONCAKE = EnginePool(storage="mooncake", extra_config='{"protocol": "rdma"}', page_tokens=64)
HF3FS = EnginePool(storage="hf3fs", extra_config="@/etc/hf3fs.json", host_gb=4)
KINDS: dict[str, tuple[EngineOptions, dict[str, object]]] = {
    "cpu": (EngineOptions(), {"device": "cpu", "dtype": "float32"}),
    "gpu": (EngineOptions(has_gpu=True), {"dtype": "bfloat16", "enable_fp32_lm_head": True}),
    "wide": (WIDE, {"tp_size": 8, "ep_size": 8, "dp_size": 4, "base_gpu_id": 2}),
    "prefill": (
        EngineOptions(has_gpu=True, role="prefill", tensor_parallel=4, bootstrap_port=9001),
        {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 9001, "tp_size": 4},
    ),
    "decode": (
        EngineOptions(has_gpu=True, role="decode"),
        {"disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": True},
    ),
    "mooncake": (
        EngineOptions(has_gpu=True, pool=MOONCAKE),
        {
            "hicache_storage_backend": "mooncake",
            "hicache_storage_backend_extra_config": MOONCAKE.extra_config,
            "page_size": 64,
        },
    ),
    "hf3fs": (
        EngineOptions(has_gpu=True, pool=HF3FS),
        {"hicache_storage_backend": "hf3fs", "hicache_size": 4},
    ),
    "head": (
        EngineOptions(has_gpu=True, head="/h", draft_steps=2),
        {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": 2,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 3,
            "speculative_draft_model_quantization": "unquant",
        },
    ),
    "decode with a pool": (
        EngineOptions(has_gpu=True, role="decode", pool=MOONCAKE),
        {"page_size": 64, "hicache_storage_backend": None},
    ),
    "adapters": (
        EngineOptions(adapters=EngineAdapters(rank=4, targets=("q_proj", "down_proj"))),
        {
            "enable_lora": True,
            "max_lora_rank": 4,
            "lora_target_modules": ["q_proj", "down_proj"],
            "lora_backend": "torch_native",
        },
    ),
    "small model": (EngineOptions(draft_model="/m"), {"speculative_algorithm": "STANDALONE"}),
}
MAY_BE_GIVEN = {
    *("--dtype", "--attention-backend", "--sampling-backend", "--disable-cuda-graph"),
    *("--max-running-requests", "--max-total-tokens", "--log-level", "--log-level-http"),
    "--lora-backend",
}
"""What ForgeMQ sets and a run's file may set otherwise."""


@pytest.fixture(scope="module")
def sglang() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def arguments(options: EngineOptions, *, has_fp8_blocks: bool = False) -> list[str]:
    """What SGLang is given, behind the interpreter and the module."""
    command = command_line(
        options,
        model_path="m",
        host="h",
        port=7,
        has_experts=options.expert_parallel > 1,
        has_fp8_blocks=has_fp8_blocks,
    )
    return command[3:]


@pytest.mark.parametrize("kind", KINDS)
def test_sglang_reads_what_the_options_say(sglang: argparse.ArgumentParser, kind: str) -> None:
    options, expected = KINDS[kind]
    read = sglang.parse_args(arguments(options, has_fp8_blocks=True))
    assert {name: getattr(read, name) for name in expected} == expected
    assert read.quantization == "fp8"
    assert read.fp8_gemm_runner_backend == ("triton" if options.has_gpu else "auto")


def spellings(sglang: argparse.ArgumentParser) -> Iterator[str]:
    """Every name that SGLang has for a flag that ForgeMQ sets on some engine."""
    used = {text for options, _ in KINDS.values() for text in arguments(options)}
    for action in sglang._actions:
        if used.intersection(action.option_strings):
            yield from action.option_strings


def test_no_other_name_of_a_flag_that_forgemq_sets_is_let_through(
    sglang: argparse.ArgumentParser,
) -> None:
    names = set(spellings(sglang))
    assert names > {"--tp-size", "--tensor-parallel-size", "--model", "--enable-dp-attention"}
    taken = set()
    for name in names:
        try:
            check_lanes((LaneEngines(flags=(name,)),), partitions=1)
        except ValueError as error:
            assert f"lanes.0.flags must be without {name}" in str(error)  # noqa: PT017
        else:
            taken.add(name)
    assert taken == MAY_BE_GIVEN


def test_sglang_takes_as_many_stop_strings_as_a_request_may_have() -> None:
    from sglang.srt.sampling.sampling_params import MAX_STOP_COUNT

    assert MAX_STOP_COUNT == STOP_STRINGS_MAX


def test_sglang_has_every_name_that_a_hook_takes() -> None:
    """SGLang only logs a hook on a name that it does not have."""
    values = vars(plugin).values()
    names = [name for name in values if isinstance(name, str) and name.startswith("sglang.srt.")]
    assert len(names) == 18
    assert all(callable(pkgutil.resolve_name(name)) for name in names)
