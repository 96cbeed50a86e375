"""What do log-probabilities lose if engines hold projections as 8-bit floats in blocks?

A real engine on a CPU samples after the contexts of demonstrated episodes, at temperature 1.
`gap` is the difference between its log-probabilities and those of the same tokens under stock
transformers with the weights in full; `weights_gap` that of weights which are rounded as the
engine's, with inputs that are not. `demo` is the model of the demo, of which the key and value
projections have too few rows for a block and stay in full with the query's. `all_blocks` is the
same function with more key heads, so that every projection is rounded.

`bfloat16, 512 MB`: what the trainer does of each version, without an engine. `x SHA-256` is the CPU
time over that of the checksum of the full file, `memory` what the process has at most beyond what
it has before.

    make load NAME=quantised_engine JSON=quantised_engine.json
"""

import asyncio
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from measurement import Measurement, arguments
from real_engines import real_engines
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from wide_demo import wide_demo

from forgemq_fp8_blocks import add_quantised, dequantised, quantise_model
from forgemq_inference.engine import Engine

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "deploy" / "demo" / "model"
sys.path.append(str(ROOT / "deploy" / "demo"))

from shop_desk.warm_start import Examples  # noqa: E402  # it lies in the folder above

SEED = 0
CONTEXTS = 48
OUTPUT_TOKENS = 60
TIMEOUT_S = 120.0
LARGE_CASE = "bfloat16, 512 MB"
LARGE_LAYERS, LARGE_WIDTH = 8, 4096
LOOK_EVERY_S = 0.005
MEMORY_FLAG = "--quantise"


class Sampled(NamedTuple):
    """A context and the tokens sampled after it, and log-probabilities of those from `first` on."""

    ids: list[int]
    first: int
    logprobs: np.ndarray


def contexts() -> list[list[int]]:
    """Beginnings of demonstrated episodes, of various lengths."""
    choose = random.Random(SEED)
    examples = Examples(AutoTokenizer.from_pretrained(DEMO), choose)
    found: list[list[int]] = []
    while len(found) < CONTEXTS:
        found += [each.ids[: choose.randint(40, len(each.ids))] for each in examples.episodes(0)]
    return found[:CONTEXTS]


async def sample(model: Path, folder: Path) -> list[Sampled]:
    """What an engine with this model samples after each context."""
    async with real_engines(model, folder, count=1) as (engine,):
        return [await _sample(engine, context) for context in contexts()]


async def _sample(engine: Engine, context: list[int]) -> Sampled:
    sampling = {"temperature": 1.0, "max_new_tokens": OUTPUT_TOKENS}
    body = {"input_ids": context, "sampling_params": sampling, "return_logprob": True}
    answer = await engine.generate(body, timeout_s=TIMEOUT_S)
    rows = answer.meta_info.output_token_logprobs
    tokens = [token for _, token, _ in rows]
    logprobs = np.array([logprob for logprob, _, _ in rows], np.float64)
    return Sampled([*context, *tokens], len(context), logprobs)


def logprobs_of(sampled: Sampled, policy: torch.nn.Module) -> np.ndarray:
    """The policy's log-probabilities of the sampled tokens."""
    ids = torch.tensor([sampled.ids])
    with torch.no_grad():
        rows = torch.log_softmax(policy(ids).logits[0].float(), -1)[sampled.first - 1 : -1]
    return rows.gather(1, ids[0, sampled.first :, None])[:, 0].numpy()


def gaps(sampled: Sequence[Sampled], full: Path, small: Path) -> dict[str, np.ndarray]:
    """Differences for every sampled token, nats: of the engine, and of its weights alone."""
    policy = AutoModelForCausalLM.from_pretrained(full, dtype=torch.float32)
    exact = np.concatenate([logprobs_of(each, policy) for each in sampled])
    found = np.concatenate([each.logprobs for each in sampled])
    tensors = load_file(small / "model.safetensors")
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if (scales := tensors.get(f"{name}_scale_inv")) is not None:
                parameter.copy_(dequantised(tensors[name], scales))
    rounded = np.concatenate([logprobs_of(each, policy) for each in sampled])
    return {"gap": np.abs(found - exact), "weights_gap": np.abs(rounded - exact)}


def measure_gap(measurement: Measurement, case: str, full: Path, folder: Path) -> None:
    """Rows of one model."""
    small = folder / "fp8"
    quantise_model(full, small)
    sampled = asyncio.run(sample(small, folder))
    found = gaps(sampled, full, small)
    measurement.row(case, "tokens", len(found["gap"]), "")
    for name, values in found.items():
        measurement.row(case, f"{name}_mean", float(values.mean()), "nats")
        measurement.row(case, f"{name}_p999", float(np.quantile(values, 0.999)), "nats")
        measurement.row(case, f"{name}_max", float(values.max()), "nats")
    sizes = [(each / "model.safetensors").stat().st_size for each in (small, full)]
    measurement.row(case, "bytes_over_full", sizes[0] / sizes[1], "")


def measure_large(measurement: Measurement, folder: Path) -> None:
    """Rows of a file of 512 MB, quantised in a process of its own."""
    full = folder / "full"
    full.mkdir()
    (full / "config.json").write_text("{}")
    generator = torch.Generator().manual_seed(SEED)
    tensors = {
        f"model.layers.{layer}.mlp.{name}_proj.weight": torch.randn(
            LARGE_WIDTH, LARGE_WIDTH, generator=generator
        ).bfloat16()
        for layer in range(LARGE_LAYERS)
        for name in ("gate", "up")
    }
    save_file(tensors, full / "model.safetensors")
    command = [sys.executable, __file__, MEMORY_FLAG, str(full), str(folder / "small")]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    for name, value in json.loads(ended.stdout).items():
        measurement.row(LARGE_CASE, name, value, {"memory": "MB"}.get(name, "x"))


def quantise_and_report(full: Path, folder: Path) -> None:
    """Quantise a model and print what it took; `folder` is made."""
    torch.set_num_threads(1)
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    file = full / "model.safetensors"
    started_s = time.process_time()
    with file.open("rb") as data:
        hashlib.file_digest(data, "sha256")
    digest_s = time.process_time() - started_s
    before_kb, started_s = _anonymous_kb(), time.process_time()
    with ThreadPoolExecutor() as pool:
        done = threading.Event()
        peak_kb = pool.submit(_peak_kb, done)
        add_quantised(full, folder)
        took_s = time.process_time() - started_s
        done.set()
    size = (folder / "model.safetensors").stat().st_size / file.stat().st_size
    report = {
        "x SHA-256": took_s / digest_s,
        "memory": (peak_kb.result() - before_kb) / 1024,
        "bytes_over_full": size,
    }
    sys.stdout.write(json.dumps(report))


def _peak_kb(done: threading.Event) -> int:
    """The most memory until the event."""
    peak_kb = 0
    while not done.wait(LOOK_EVERY_S):
        peak_kb = max(peak_kb, _anonymous_kb())
    return peak_kb


def _anonymous_kb() -> int:
    """Memory without the pages of mapped files, which are the kernel's to take back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def main() -> int:
    """Run the cases that were asked for."""
    options = arguments(__doc__)
    torch.set_num_threads(1)
    measurement = Measurement(
        name="quantised_engine",
        question="What do log-probabilities lose if engines hold 8-bit floats in blocks?",
    )
    wanted = options.case or ("demo", "all_blocks", LARGE_CASE)
    for case in ("demo", "all_blocks"):
        if case in wanted:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                full = DEMO if case == "demo" else wide_demo(folder / "wide")
                measure_gap(measurement, case, full, folder)
    if LARGE_CASE in wanted:
        with tempfile.TemporaryDirectory() as temporary:
            measure_large(measurement, Path(temporary))
    return measurement.finish(options.json)


if __name__ == "__main__":
    if MEMORY_FLAG in sys.argv:
        quantise_and_report(*map(Path, sys.argv[2:]))
        sys.exit(0)
    sys.exit(main())
