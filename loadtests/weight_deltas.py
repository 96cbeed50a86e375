"""How much smaller is what a step changes than all weights, and what does it cost?

`lr ...`: the demo's model takes steps of the trainer's own optimizer, by the gradient of sampled
tokens with random advantages. AdamW's steps have about the size of its learning rate whatever the
gradient is, so the share of values that change follows from that, the spacing of the dtype and the
size of the weights.

`1 %`, `all`: a file of 512 MB in which so many values change by one unit in the last place. The
baseline in the same run is the SHA-256 of the file, which publishing takes of every version.
"""

import hashlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from measurement import Measurement, arguments
from safetensors.torch import save_file, save_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from forgemq_contracts.run import Optimizer
from forgemq_trainer.core.optimizer import Updater
from forgemq_trainer.model import DTYPES
from forgemq_weight_deltas import patch, write_delta

MODEL = Path(__file__).parent.parent / "deploy/demo/model"
STEPS = 8
WARM_UP_STEPS = 20
BATCH, TOKENS = 8, 128
SPEED_VALUES = 256 * 2**20
REPEATS = 3
LEARNING = {
    "lr 1e-6, bfloat16": ("bfloat16", 1e-6),
    "lr 1e-5, bfloat16": ("bfloat16", 1e-5),
    "lr 1e-3, float32": ("float32", 1e-3),
}
CHANGING = {"1 %": 0.01, "all": 1.0}


def versions(dtype: str, lr: float) -> Iterator[PreTrainedModel]:
    """A model after each of its steps, the first after its moments have settled."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=DTYPES[dtype])
    updater = Updater(model, Optimizer(lr=lr))
    for step in range(WARM_UP_STEPS + STEPS + 1):
        _policy_gradient(model)
        updater.update(lr=lr)
        if step >= WARM_UP_STEPS:
            yield model


def _policy_gradient(model: PreTrainedModel) -> None:
    """The gradient of sampled tokens' log-probabilities, each sample's times a random advantage."""
    prompts = torch.randint(0, model.config.vocab_size, (BATCH, TOKENS))
    with torch.no_grad():
        logits = model(prompts).logits
        sampled = torch.multinomial(logits.float().softmax(-1).flatten(0, 1), 1).view_as(prompts)
    logprobs = model(prompts).logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, sampled[..., None])[..., 0]
    (-(torch.randn(BATCH, 1) * chosen).mean()).backward()


def measure_learning(measurement: Measurement, case: str, folder: Path) -> None:
    """Rows of one learning rate: means over steps, each step's delta and the chain of all."""
    dtype, lr = LEARNING[case]
    older, newer = folder / "old.safetensors", folder / "new.safetensors"
    shares, sizes = [], []
    for number, model in enumerate(versions(dtype, lr)):
        save_model(model, str(newer))
        if number:
            figures = write_delta(older, newer, io.BytesIO())
            shares.append(figures.changed / figures.values)
            sizes.append(figures.size_bytes / newer.stat().st_size)
        newer.replace(older)
    measurement.row(case, "changed_share", statistics.fmean(shares), "1")
    measurement.row(case, "delta_over_full", statistics.fmean(sizes), "x")


def measure_changing(measurement: Measurement, case: str, folder: Path) -> None:
    """Rows of one share of changed values: sizes, and time over that of a checksum."""
    torch.manual_seed(0)
    old, new, delta = (folder / name for name in ("old", "new", "delta"))
    values = (0.02 * torch.randn(SPEED_VALUES)).to(torch.bfloat16)
    save_file({"a": values}, old)
    values.view(torch.int16).add_((torch.rand(SPEED_VALUES) < CHANGING[case]).to(torch.int16))
    save_file({"a": values}, new)
    del values

    def write() -> None:
        with delta.open("wb") as file:
            write_delta(old, new, file)

    def apply() -> None:
        with delta.open("rb") as file:
            patch(target, file)

    rows: dict[str, list[float]] = {"write": [], "patch": []}
    baseline_s = 0.0
    target = folder / "target"
    for _ in range(REPEATS):
        target.write_bytes(old.read_bytes())
        baseline_s = seconds(lambda: sha256(new))
        rows["write"].append(seconds(write) / baseline_s)
        rows["patch"].append(seconds(apply) / baseline_s)
        assert sha256(target) == sha256(new)
    measurement.row(case, "delta_over_full", delta.stat().st_size / new.stat().st_size, "x")
    for name, ratios in rows.items():
        measurement.row(case, f"{name}_over_sha256", statistics.median(ratios), "x")
    measurement.row(case, "sha256", new.stat().st_size / 1e6 / baseline_s, "MB/s")


def sha256(path: Path) -> str:
    """Checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    begun_s = time.process_time()
    work()
    return time.process_time() - begun_s


def main() -> int:
    """Measure all cases."""
    chosen = arguments(__doc__ or "")
    torch.set_num_threads(1)
    measurement = Measurement(
        name="weight_deltas",
        question="How much smaller is what a step changes than all weights, and what does it cost?",
        conditions={
            "learning": f"the demo's model, AdamW, {STEPS} steps after {WARM_UP_STEPS}",
            "file": f"{SPEED_VALUES} values in bfloat16, CPU seconds, median of {REPEATS}",
        },
    )
    for cases, measure in ((LEARNING, measure_learning), (CHANGING, measure_changing)):
        for case in cases:
            if chosen.case is None or case in chosen.case:
                with tempfile.TemporaryDirectory() as folder:
                    measure(measurement, case, Path(folder))
    return measurement.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
