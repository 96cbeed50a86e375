"""What is loaded from a folder is what transformers loads, and no rank holds more than its part."""

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from forgemq_trainer.heap import map_large_tensors
from forgemq_trainer.loading import fill
from forgemq_trainer.model import DTYPES, load_empty, load_model, prepare
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.ranks.sharding import shard, whole_state
from forgemq_trainer.storage.tensor_files import StoredTensorsError
from tests.unit.trainer.rank_scene import START_DEADLINE_S, WORK_DEADLINE_S, WORLD, RankPair
from tests.unit.trainer.scene import make_model

KINDS = ("qwen3", "llama", "qwen2", "qwen3_moe")
MIB = 1 << 20
SLACK_BYTES = 8 * MIB
"""For the index of the folder and the modules of the model, beside its tensors."""

of_two_ranks = pytest.mark.timeout(START_DEADLINE_S + 2 * WORK_DEADLINE_S)


def _expected(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return prepare(model).model


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    "stored",
    [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16],
    ids=["fp32", "bf16"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_buffers_are_those_of_transformers_to_the_byte(
    tmp_path: Path, kind: str, stored: torch.dtype
) -> None:
    make_model(kind, stored).save_pretrained(tmp_path / "whole")
    make_model(kind, stored).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    for dtype in ("float32", "bfloat16"):
        expected = _expected(tmp_path / "whole", DTYPES[dtype])
        for folder in ("whole", "shards"):
            found = load_model(tmp_path / folder, dtype=dtype).model
            _assert_equal(found.state_dict(), expected.state_dict())
            _assert_equal(dict(found.named_buffers()), dict(expected.named_buffers()))


@pytest.mark.parametrize("kind", ["minimax_m2", "glm4_moe", "deepseek_v3"])
def test_a_routers_bias_stays_float32_in_a_narrow_model(tmp_path: Path, kind: str) -> None:
    """As engines have it, and ranks whose parameters are masters of a narrow model."""
    model = make_model(kind, torch.float32)
    model.save_pretrained(tmp_path)

    def biases(module: torch.nn.Module) -> dict[str, torch.Tensor]:
        named = module.state_dict().items()
        return {name: value for name, value in named if name.endswith("e_score_correction_bias")}

    stored, found = biases(model), biases(load_model(tmp_path, dtype="bfloat16").model)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in stored.values())
    _assert_equal(found, stored)


def _parts(ranks: Ranks, folder: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """On rank 0 all weights whole, and the names of what no rank has a part of."""
    loaded = shard(
        load_empty(folder, dtype="float32", device="cpu"), ranks=ranks, dtype=torch.float32
    )
    fill(loaded.model, folder)
    whole = whole_state(loaded.model, dtype=torch.float32, is_kept=ranks.rank == 0)
    unshared = [n for n, p in loaded.model.named_parameters() if not isinstance(p, DTensor)]
    return whole, unshared


@pytest.mark.slow
@of_two_ranks
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_hold_what_transformers_loads_to_the_byte(
    tmp_path: Path, rank_pair: RankPair, kind: str
) -> None:
    """With shards of two sizes, as 61 rows and 5 experts give."""
    changes = {"vocab_size": 61, "num_experts": 5}
    make_model(kind, torch.bfloat16, **changes).save_pretrained(tmp_path, max_shard_size="20KB")
    (found, unshared), _ = rank_pair.run(_parts, tmp_path)
    _assert_equal(found, dict(_expected(tmp_path, torch.float32).state_dict()))
    assert unshared == []


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def _load_shard(ranks: Ranks, folder: Path) -> torch.nn.Module:
    empty = load_empty(folder, dtype="float32", device="cpu")
    loaded = shard(empty, ranks=ranks, dtype=torch.bfloat16)
    fill(loaded.model, folder)
    return loaded.model


def _peak_growth(ranks: Ranks, folder: Path) -> tuple[int, int]:
    """By how much resident memory grew at most while a rank loaded, and the bytes of its shard."""
    # A process that loads for the first time also faults in 15 MiB of its libraries.
    _load_shard(ranks, folder)
    # What an earlier model left, and free memory in the heap, would hide a growth.
    gc.collect()
    map_large_tensors()
    Path("/proc/self/clear_refs").write_text("5")  # Makes the highest resident size the present.
    before = _status_bytes("VmRSS")
    model = _load_shard(ranks, folder)
    peak = _status_bytes("VmHWM")
    shards = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    return peak - before, sum(each.numel() * each.itemsize for each in shards)


@pytest.mark.slow
@of_two_ranks
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_rank_never_holds_more_than_its_shard_and_one_tensor(
    tmp_path: Path, rank_pair: RankPair, kind: str
) -> None:
    """Mapped pages of files counted; the whole model would be twice a shard."""
    sizes = {"vocab_size": 12_000, "hidden_size": 512, "intermediate_size": 2048}
    sizes |= {"num_experts": 8, "moe_intermediate_size": 256, "num_hidden_layers": 5}
    model = make_model(kind, torch.float32, **sizes)
    model.save_pretrained(tmp_path)
    shard_bytes = sum(p.numel() * p.itemsize for p in model.parameters()) // WORLD
    largest = max(p.numel() * p.itemsize for p in model.parameters())
    for growth, held in rank_pair.run(_peak_growth, tmp_path):
        assert held == pytest.approx(shard_bytes, rel=0.01)
        assert held <= growth <= held + largest + SLACK_BYTES
    assert largest + SLACK_BYTES < 0.7 * shard_bytes, "else the whole model would pass too"


Tensors = dict[str, torch.Tensor]
GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


def _without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def _with(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=dtype)})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_without(NORM), f"has no tensor for {NORM}"),
        (_without("lm_head.weight"), "has no tensor for lm_head.weight"),
        (_without(GATE), r"no tensor like .*gate_proj.weight with number 2; the model has 4"),
        (_with(NORM, 31), rf"{NORM} in .* has shape \(31,\); .* asks for \(32,\)"),
        (_with(GATE, 24, 31), rf"{GATE} in .* has shape \(24, 31\); .* asks for \(24, 32\)"),
        (_with(GATE.replace(".2.", ".4."), 24, 32), "experts.4.* is one too many"),
        (_with(NORM, 32, dtype=torch.int8), f"{NORM} in .* is of int8; supported: float64"),
        (
            _with("model.layers.1.mlp.experts.gate_up_proj", 4, 48, 32),
            "tensors .*gate_up_proj.* in .* are both model.layers.1.mlp.experts.gate_up_proj",
        ),
        (_with("layers.0.input_layernorm.weight", 32), f"are both {NORM}"),
        (
            _with("model.layers.0.self_attn.q_proj.bias", 32),
            "q_proj.bias in .* is unknown to the model",
        ),
    ],
    ids=[
        "missing",
        "head missing",
        "expert missing",
        "shape",
        "expert's shape",
        "expert too many",
        "dtype",
        "experts twice",
        "twice by another name",
        "unknown",
    ],
)
def test_a_tensor_that_is_not_as_the_model_needs_it_is_refused_by_name(
    tmp_path: Path, change: Callable[[Tensors], None], reason: str
) -> None:
    make_model("qwen3_moe", torch.float32).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(StoredTensorsError, match=reason):
        load_model(tmp_path, dtype="float32")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_a_value_that_is_not_finite_is_refused_by_its_tensor(tmp_path: Path, value: float) -> None:
    """The last is finite in the file, and infinite in bfloat16."""
    make_model("qwen3", torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[NORM][3] = value
    save_file(tensors, file, metadata={"format": "pt"})
    reason = f"tensor {NORM} has values that are infinite or no numbers in bfloat16"
    with pytest.raises(StoredTensorsError, match=reason):
        load_model(tmp_path, dtype="bfloat16")
    if value == 3.4e38:
        load_model(tmp_path, dtype="float32")


def test_an_index_and_its_files_must_agree(tmp_path: Path) -> None:
    make_model("qwen3", torch.float32).save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    named = json.loads(index.read_bytes())["weight_map"]
    file = tmp_path / named[NORM]
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": torch.zeros(64, 32)}, file)
    with pytest.raises(StoredTensorsError, match=r"embed_tokens.weight and lm_head.weight differ"):
        load_model(tmp_path, dtype="float32")
    save_file({**tensors, "model.norm.weight": torch.zeros(32)}, file)
    assert named["model.norm.weight"] != file.name
    with pytest.raises(StoredTensorsError, match=r"tensor model.norm.weight is in .* and in "):
        load_model(tmp_path, dtype="float32")
    save_file({name: value for name, value in tensors.items() if name != NORM}, file)
    with pytest.raises(StoredTensorsError, match=f"tensor {NORM} in {file.name}, which does not"):
        load_model(tmp_path, dtype="float32")
    file.unlink()
    with pytest.raises(StoredTensorsError, match=f"names {file.name}, which is not there"):
        load_model(tmp_path, dtype="float32")
    index.unlink()
    with pytest.raises(StoredTensorsError, match=r"neither model.safetensors nor"):
        load_model(tmp_path, dtype="float32")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:-1], r"{file}: the file has \d+ bytes and by its header \d+: it was"),
        (
            lambda data: data + b"xy",
            r"{file}: the file has \d+ bytes and by its header \d+: it was",
        ),
        (
            lambda data: data.replace(b'"shape":[32]', b'"shape":[31]', 1),
            r"{file}: tensor \S+ of 124 bytes lies in 128 of them",
        ),
        (lambda data: data.replace(b'"dtype"', b'"dtipe"', 1), "{file}: safetensors header: "),
    ],
    ids=["cut short", "too long", "other size", "damaged header"],
)
def test_a_damaged_file_is_refused_by_name_before_anything_is_read(
    tmp_path: Path, change: Callable[[bytes], bytes], reason: str
) -> None:
    make_model("qwen3", torch.float32).save_pretrained(tmp_path, max_shard_size="20KB")
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(StoredTensorsError, match=reason.format(file=file)):
        load_model(tmp_path, dtype="float32")
