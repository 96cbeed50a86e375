"""The command line and environment of an engine, and what a server refuses before it starts."""

import json
import os
import socket
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import psutil
import pytest

from forgemq_settings.ports import free_port
from forgemq_sglang_cpu.options import (
    EngineOptions,
    command_line,
    environment,
    has_fp8_blocks,
    is_mixture,
)
from forgemq_sglang_cpu.plugin import FP8_BLOCKS_VARIABLE
from forgemq_sglang_cpu.server import EngineServer, EngineServerError, with_reading

MODEL = Path(__file__).parents[3] / "deploy" / "demo" / "model"


def line(options: EngineOptions) -> str:
    return " ".join(command_line(options, model_path="m", host="127.0.0.1", port=7)[1:])


def test_a_cpu_engine_runs_in_float32_with_a_bounded_cache() -> None:
    command = line(EngineOptions(context_tokens_max=1024, extra=("--tp", "2")))
    assert command.startswith("-m forgemq_sglang_cpu --model-path m --host 127.0.0.1 --port 7")
    assert "--device cpu --dtype float32" in command
    assert "--max-total-tokens 40000 --max-running-requests 48" in command
    assert "--context-length 1024" in command
    assert command.endswith("--tp 2")


def test_a_gpu_engine_leaves_device_and_cache_to_sglang() -> None:
    command = line(EngineOptions(has_gpu=True, tensor_parallel=4))
    assert "--dtype bfloat16 --tp-size 4 --enable-fp32-lm-head" in command
    absent = ("--device", "--max-total-tokens", "--max-running-requests", "torch_native")
    for argument in (*absent, "--base-gpu-id"):
        assert argument not in command


def test_a_gpu_engine_that_records_expert_routes_runs_a_kernel_that_gets_them() -> None:
    runner = ["--moe-runner-backend", "triton"]
    for options, has_experts, expected in (
        (EngineOptions(has_gpu=True), True, runner),
        (EngineOptions(has_gpu=True), False, []),
        (EngineOptions(), True, []),
    ):
        command = command_line(
            options, model_path="m", host="127.0.0.1", port=7, has_experts=has_experts
        )
        start = command.index(runner[0]) if runner[0] in command else len(command)
        assert command[start : start + 2] == expected


@pytest.mark.parametrize("has_gpu", [False, True])
def test_an_engine_that_drafts_makes_one_chain_and_reads_it_with_the_token_before_it(
    has_gpu: bool,
) -> None:
    command = line(EngineOptions(has_gpu=has_gpu, head="h", draft_steps=5))
    assert command.endswith(
        "--speculative-algorithm EAGLE --speculative-draft-model-path h --speculative-num-steps 5 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 6"
    )
    assert "speculative" not in line(EngineOptions(has_gpu=has_gpu))
    small = line(EngineOptions(has_gpu=has_gpu, draft_model="m", draft_steps=5))
    assert small == command.replace("EAGLE", "STANDALONE").replace("path h", "path m")


def test_engines_that_share_a_machine_begin_at_different_gpus() -> None:
    command = line(EngineOptions(has_gpu=True, tensor_parallel=2, gpu_first=2))
    assert "--tp-size 2 --base-gpu-id 2" in command


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_experts_per_tok": 8}, True),
        ({"text_config": {"num_experts_per_tok": 2}}, True),
        ({"num_experts_per_tok": None}, False),
        ({"hidden_size": 64}, False),
    ],
)
def test_a_mixture_of_experts_is_started_so_that_it_can_say_which_ran(
    config: dict[str, object], expected: bool
) -> None:
    assert is_mixture(json.dumps(config).encode()) == expected
    command = command_line(
        EngineOptions(), model_path="m", host="127.0.0.1", port=7, has_experts=expected
    )
    assert ("--enable-return-routed-experts" in command) == expected


def test_the_environment_keeps_health_checks_shallow_and_logprobs_after_the_temperature() -> None:
    inherited = {"PATH": "/bin", "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "9"}
    cpu = environment(EngineOptions(threads=2), inherited, pid=5, weight_bytes=0)
    gpu = environment(EngineOptions(has_gpu=True), inherited, pid=5, weight_bytes=0)
    assert cpu["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert cpu["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
    assert cpu["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] == "0"
    assert (cpu["OMP_NUM_THREADS"], gpu["OMP_NUM_THREADS"]) == ("2", "9")
    assert (cpu["CUDA_VISIBLE_DEVICES"], "CUDA_VISIBLE_DEVICES" in gpu) == ("", False)
    assert "SGLANG_USE_CPU_ENGINE" not in cpu
    assert (cpu["PATH"], cpu["FORGEMQ_ENGINE_PARENT"]) == ("/bin", "5")
    # SGLang builds GPU kernels with the ninja in the interpreter's folder.
    assert gpu["PATH"] == f"{Path(sys.executable).parent}:/bin"


def test_an_engine_waits_for_its_trainer_by_the_size_of_the_weights() -> None:
    options = EngineOptions(weight_group_timeout_s=30, weight_bytes_per_s_min=2e8)
    variables = [
        environment(options, {}, pid=5, weight_bytes=size)["FORGEMQ_ENGINE_WEIGHT_GROUP_TIMEOUT_S"]
        for size in (0, 61 * 10**9)
    ]
    assert variables == ["30.0", "335.0"]


def test_sglang_finds_the_platform_and_the_hooks() -> None:
    found = {
        (point.group, point.name): point.value
        for group in ("sglang.srt.platforms", "sglang.srt.plugins")
        for point in entry_points(group=group)
    }
    assert found["sglang.srt.platforms", "forgemq_cpu"] == "forgemq_sglang_cpu.plugin:activate"
    assert (
        found["sglang.srt.plugins", "forgemq_cpu_hooks"]
        == "forgemq_sglang_cpu.plugin:register_hooks"
    )


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineServerError, match=r"config\.json is missing"):
        EngineServer(str(tmp_path), tmp_path, port=free_port()).start()
    (tmp_path / "config.json").write_text("no model")
    with pytest.raises(EngineServerError, match=r"no model at .*config\.json: JSON is malformed"):
        EngineServer(str(tmp_path), tmp_path, port=free_port()).start()


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineServerError, match=f"port {port} of 127.0.0.1 cannot be used"):
            EngineServer(str(tmp_path), tmp_path, port=port).start()


def test_an_engine_leads_a_group_in_the_session_of_its_starter(tmp_path: Path) -> None:
    """Linux shares the CPU by session first: engines with one each starve all else."""
    engine = EngineServer(str(MODEL), tmp_path, port=free_port())
    engine.start()
    try:
        assert engine.pid is not None
        assert (os.getsid(engine.pid), os.getpgid(engine.pid)) == (os.getsid(0), engine.pid)
    finally:
        engine.stop()


@pytest.mark.slow
def test_an_engine_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """A child that leads its process group watches a parent, which is killed."""
    pids = tmp_path / "pid"
    child = (
        "import os, time, pathlib; from forgemq_sglang_cpu.orphan import end_with_parent; "
        f"end_with_parent(os.getppid()); pathlib.Path({str(pids)!r}).write_text(str(os.getpid())); "
        "time.sleep(60)"
    )
    parent = (
        "import subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, '-c', {child!r}], process_group=0); "
        "time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent])
    try:
        while not pids.exists() or not pids.read_text():
            time.sleep(0.05)
        watched = psutil.Process(int(pids.read_text()))
        assert watched.status() != psutil.STATUS_ZOMBIE
    finally:
        process.kill()
        process.wait()
    for _ in range(100):
        if not watched.is_running() or watched.status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    pytest.fail("the child outlived its parent")


def test_a_failed_start_shows_the_end_of_the_log_without_its_longest_lines(tmp_path):
    (tmp_path / "engine.log").write_text(f"server_args={'x' * 20_000}\nRuntimeError: no luck\n")
    with pytest.raises(EngineServerError, match=r"RuntimeError: no luck$") as caught:
        EngineServer("model", tmp_path, port=1).wait_healthy()
    assert len(str(caught.value)) < 1000


def test_an_engine_whose_model_has_8_bit_blocks_says_so_and_loads_what_it_needs() -> None:
    config = b'{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}'
    assert has_fp8_blocks(config)
    for other in (
        b"{}",
        b'{"quantization_config": {"quant_method": "fp8"}}',
        b'{"quantization_config": {"quant_method": "awq", "weight_block_size": [1, 2]}}',
    ):
        assert not has_fp8_blocks(other)
    flag = "--quantization fp8"
    for is_fp8 in (False, True):
        command = command_line(
            EngineOptions(), model_path="m", host="h", port=7, has_fp8_blocks=is_fp8
        )
        made = environment(EngineOptions(), {}, pid=1, weight_bytes=0, has_fp8_blocks=is_fp8)
        assert (flag in " ".join(command), FP8_BLOCKS_VARIABLE in made) == (is_fp8, is_fp8)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("has_gpu", [False, True])
def test_8_bit_blocks_on_gpus_are_computed_by_kernels_whose_weights_can_be_replaced(
    has_gpu: bool, is_fp8: bool
) -> None:
    command = command_line(
        EngineOptions(has_gpu=has_gpu),
        model_path="m",
        host="h",
        port=7,
        has_fp8_blocks=is_fp8,
    )
    assert ("--fp8-gemm-backend triton" in " ".join(command)) == (has_gpu and is_fp8)


def test_a_start_may_take_as_long_as_its_weights_are_read() -> None:
    assert with_reading(600.0, weight_bytes=0) == 600.0
    assert with_reading(600.0, weight_bytes=460 * 10**9) == 2900.0


def test_a_gpu_engine_without_a_compiler_of_kernels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    alone = {"PATH": str(tmp_path)}
    server = EngineServer(
        str(tmp_path),
        tmp_path,
        port=free_port(),
        options=EngineOptions(has_gpu=True),
        inherited=alone,
    )
    with pytest.raises(EngineServerError, match=r"compiles kernels and needs a C\+\+ compiler"):
        server.start()
    assert not server.is_running()


@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_draft_head_is_in_full_beside_8_bit_weights(is_fp8: bool) -> None:
    command = command_line(
        EngineOptions(head="head"), model_path="m", host="h", port=7, has_fp8_blocks=is_fp8
    )
    assert (" ".join(command).count("--speculative-draft-model-quantization unquant")) == is_fp8
