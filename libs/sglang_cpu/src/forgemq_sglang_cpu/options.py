"""The command line and environment of one SGLang server, as pure functions."""

import os
import sys
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from forgemq_sglang_cpu import pair
from forgemq_sglang_cpu.adapters import EngineAdapters, adapter_arguments
from forgemq_sglang_cpu.plugin import FP8_BLOCKS_VARIABLE, WEIGHT_GROUP_TIMEOUT_VARIABLE
from forgemq_sglang_cpu.pool import EnginePool, arguments

MEMORY_BYTES_MIN = 3 * 2**30
"""On a CPU three processes take 1.7 GB when they answer, with a small model, and more with work."""


class _TextConfig(Struct, frozen=True):
    num_experts_per_tok: int | None = None


class _Quantization(Struct, frozen=True):
    quant_method: str = ""
    weight_block_size: tuple[int, ...] | None = None


class _ModelConfig(_TextConfig, frozen=True):
    text_config: _TextConfig | None = None
    quantization_config: _Quantization | None = None


class EngineOptions(Struct, frozen=True, kw_only=True):
    """Options of one server; the defaults serve a small model on a CPU.

    Attributes:
        has_gpu: Serve on the machine's GPUs; False: on the CPU, in float32.
        context_tokens_max: Longest context and output together; None: the model's own limit.
        cached_tokens_max: Tokens of K/V cache on a CPU; on a GPU the free memory decides.
        running_requests_max: Requests decoded together; None: 48 on a CPU, SGLang's own on a GPU.
        threads: OpenMP threads of each process; one is best for a tiny model on few cores.
        role: What the server does of each request: all of it, or one half beside another server.
        bootstrap_port: Of a prefill engine: where decode engines ask how to reach it.
        tensor_parallel: GPUs of this server, each of which has a process; on a CPU processes.
        expert_parallel: Parts that the experts of its model are spread over.
        attention_data_parallel: Groups of them that each attend for requests of their own.
        gpu_first: Number of the first of them among the GPUs that its environment shows.
        weight_version: Name of the weights the server starts with.
        weight_group_timeout_s: Longest wait of SGLang's scheduler for the trainer's process group,
            without the time that the weights' bytes take.
        weight_bytes_per_s_min: Least rate at which they arrive; their size adds to the wait. As the
            trainer's settings `transfer_deadline_s` and `transfer_bytes_per_s_min`.
        pool: That the server shares with others; None: it keeps K/V in its own memory only. A
            decode engine only takes the size of its pages, and prefill reads and writes it.
        adapters: That the server can load beside its model; None for none.
        head: Folder of a draft head that guesses tokens ahead of the model; "" for none.
        draft_model: Folder of a small model that guesses instead; "" for none.
        draft_steps: Tokens guessed before each pass of the model.
        extra: More arguments, appended unchanged; the last one of a name counts.
    """

    has_gpu: bool = False
    context_tokens_max: int | None = None
    cached_tokens_max: int = 40_000
    running_requests_max: int | None = None
    threads: int = 1
    role: pair.Role = "unified"
    bootstrap_port: int = 8998
    tensor_parallel: int = 1
    expert_parallel: int = 1
    attention_data_parallel: int = 1
    gpu_first: int = 0
    weight_version: str = "0.0"
    weight_group_timeout_s: float = 30.0
    weight_bytes_per_s_min: float = 2e8
    pool: EnginePool | None = None
    adapters: EngineAdapters | None = None
    head: str = ""
    draft_model: str = ""
    draft_steps: int = 3
    extra: tuple[str, ...] = ()


def command_line(
    options: EngineOptions,
    *,
    model_path: str,
    host: str,
    port: int,
    has_experts: bool = False,
    has_fp8_blocks: bool = False,
) -> list[str]:
    """The command line, this interpreter first.

    Args:
        options: Of the server.
        model_path: Folder in Hugging Face format.
        host: Address to listen on.
        port: Of the HTTP server.
        has_experts: The model is a mixture of experts; the server records which ones ran.
        has_fp8_blocks: Its weights are 8-bit floats in blocks.
    """
    command = [sys.executable, "-m", "forgemq_sglang_cpu", "--model-path", model_path]
    command += ["--host", host, "--port", str(port)]
    command += ["--weight-version", options.weight_version]
    command += ["--sleep-on-idle", "--skip-server-warmup", "--enable-metrics"]
    command += ["--log-level", "info", "--log-level-http", "warning"]
    if options.context_tokens_max is not None:
        command += ["--context-length", str(options.context_tokens_max)]
    command += _gpu_arguments(options) if options.has_gpu else _cpu_arguments(options)
    if has_fp8_blocks:
        command += _fp8_arguments(has_gpu=options.has_gpu)
    if options.pool is not None and options.role == "decode":
        # Prefill reads contexts, so the pool is its own; both send and take pages of one size.
        command += ["--page-size", str(options.pool.page_tokens)]
    elif options.pool is not None:
        command += arguments(options.pool, has_gpu=options.has_gpu)
    if options.adapters is not None:
        command += adapter_arguments(options.adapters, has_gpu=options.has_gpu)
    command += pair.arguments(
        options.role, has_gpu=options.has_gpu, bootstrap_port=options.bootstrap_port
    )
    running_max = options.running_requests_max or (None if options.has_gpu else 48)
    if running_max is not None:
        command += ["--max-running-requests", str(running_max)]
    if has_experts:
        command += ["--enable-return-routed-experts"]  # SGLang crashes on it with a dense model.
        if options.has_gpu:
            # SGLang's default on Blackwell routes inside its kernel and records expert 0 only.
            command += ["--moe-runner-backend", "triton"]
    if options.head or options.draft_model:
        command += _draft_arguments(options, has_fp8_blocks=has_fp8_blocks)
    return [*command, *options.extra]


def is_mixture(config: bytes) -> bool:
    """Whether a model's config.json is that of a mixture of experts, as SGLang sees it."""
    model = msgspec.json.decode(config, type=_ModelConfig)
    return bool((model.text_config or model).num_experts_per_tok)


def has_fp8_blocks(config: bytes) -> bool:
    """Whether the weights beside a config.json are 8-bit floats with a scale for each block."""
    named = msgspec.json.decode(config, type=_ModelConfig).quantization_config
    return named is not None and named.quant_method == "fp8" and named.weight_block_size is not None


def _cpu_arguments(options: EngineOptions) -> list[str]:
    # Without --max-total-tokens the K/V cache would be sized from all free memory.
    return [
        *("--device", "cpu", "--dtype", "float32"),
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--disable-cuda-graph",),
        *(_spread_arguments(options) if options.tensor_parallel > 1 else ()),
        *("--max-total-tokens", str(options.cached_tokens_max)),
    ]


def _gpu_arguments(options: EngineOptions) -> list[str]:
    # The language-model head in float32 keeps log-probabilities close to the trainer's
    # (MiniMax-M1, arXiv 2506.13585, section 3.2).
    arguments = ["--dtype", "bfloat16", *_spread_arguments(options)]
    if options.gpu_first:
        arguments += ["--base-gpu-id", str(options.gpu_first)]
    return [*arguments, "--enable-fp32-lm-head"]


def _spread_arguments(options: EngineOptions) -> list[str]:
    arguments = ["--tp-size", str(options.tensor_parallel)]
    if options.expert_parallel > 1:
        arguments += ["--ep-size", str(options.expert_parallel)]
    if options.attention_data_parallel > 1:
        arguments += ["--dp-size", str(options.attention_data_parallel), "--enable-dp-attention"]
    return arguments


def _fp8_arguments(*, has_gpu: bool) -> list[str]:
    # SGLang sees it in config.json too, and only with the flag it says so in /server_info.
    arguments = ["--quantization", "fp8"]
    # By default DeepGEMM computes. On Blackwell it packs the scales, and new ones do not fit into
    # their place; on Hopper it compiles for 10 to 20 minutes before the engine serves.
    return [*arguments, "--fp8-gemm-backend", "triton"] if has_gpu else arguments


def _draft_arguments(options: EngineOptions, *, has_fp8_blocks: bool) -> list[str]:
    # A chain and no tree: the model reads the drafted tokens and the one before them.
    arguments = [
        *("--speculative-algorithm", "EAGLE" if options.head else "STANDALONE"),
        *("--speculative-draft-model-path", options.head or options.draft_model),
        *("--speculative-num-steps", str(options.draft_steps)),
        *("--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(options.draft_steps + 1)),
    ]
    if has_fp8_blocks:
        # By default SGLang would round what guesses too, and its weights are in full.
        arguments += ["--speculative-draft-model-quantization", "unquant"]
    return arguments


def environment(
    options: EngineOptions,
    inherited: Mapping[str, str],
    *,
    pid: int,
    weight_bytes: int,
    has_fp8_blocks: bool = False,
) -> dict[str, str]:
    """The environment of the server's processes.

    Args:
        options: Decide threads and device.
        inherited: The caller's environment.
        pid: The caller's process id; the server ends with that process.
        weight_bytes: Size of the model's weights.
        has_fp8_blocks: They are 8-bit floats in blocks.
    """
    timeout_s = options.weight_group_timeout_s + weight_bytes / options.weight_bytes_per_s_min
    own = {
        "FORGEMQ_ENGINE_PARENT": str(pid),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # A health check that generates would hang while generation is paused for new weights.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # Log-probabilities must be those of the sampling distribution, after the temperature.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        WEIGHT_GROUP_TIMEOUT_VARIABLE: str(round(timeout_s, 3)),
    }
    if has_fp8_blocks:
        own[FP8_BLOCKS_VARIABLE] = "1"
    if not options.has_gpu:
        own |= {"OMP_NUM_THREADS": str(options.threads), "CUDA_VISIBLE_DEVICES": ""}
        if options.tensor_parallel > 1:
            # Each may run on each core: by default SGLang refuses more than there are NUMA nodes.
            cores = f"0-{(os.cpu_count() or 1) - 1}"
            own["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([cores] * options.tensor_parallel)
    elif "PATH" in inherited:
        # SGLang compiles GPU kernels with the ninja in its interpreter's folder.
        own["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), inherited["PATH"]))
    # An engine that has lost a process would sleep for 5 s, and for 60 s more if another one lives,
    # to write down where that is.
    diagnostics = dict.fromkeys(
        ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"), "0"
    )
    kept = {name: value for name, value in inherited.items() if name != "SGLANG_USE_CPU_ENGINE"}
    return diagnostics | kept | own
