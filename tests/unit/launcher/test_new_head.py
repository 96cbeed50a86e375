"""`forgemq new-head`: a random draft head in the format that engine and trainer read."""

import io
import json
import tomllib
from pathlib import Path, PurePath

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from forgemq_contracts.draft_head import head_shape, head_tensors, is_head
from forgemq_contracts.speculation import Speculation
from forgemq_launcher.commands.new_head import write_new_head
from forgemq_launcher.core.configuration import ConfigurationError, configuration
from forgemq_launcher.dispatch import run_tool
from forgemq_launcher.model_folder import check_draft_folder

MODEL = Path(__file__).parents[3] / "deploy" / "demo" / "model"


def tool(*arguments: str) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=200)
    status = run_tool(arguments, environ={}, console=console)
    return status, console.file.getvalue()  # type: ignore[attr-defined]


def test_a_new_head_has_the_sizes_of_the_models_layers(tmp_path: Path) -> None:
    count = write_new_head(MODEL, tmp_path / "head", seed=3)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    config = (tmp_path / "head" / "config.json").read_bytes()
    assert sum(tensor.numel() for tensor in tensors.values()) == count == 229_632
    assert is_head(config)
    assert not is_head((MODEL / "config.json").read_bytes())
    assert head_shape(config) == head_shape((MODEL / "config.json").read_bytes())
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == head_tensors(
        head_shape(config)
    )


def test_matrices_are_uniform_within_the_root_of_their_columns(tmp_path: Path) -> None:
    write_new_head(MODEL, tmp_path / "head", seed=3)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    fused = tensors["fc.weight"]
    assert fused.abs().max() <= 1 / 16 < fused.abs().max() * 1.001
    assert abs(float(fused.mean())) < 1e-3
    # Of a uniform distribution: bound / sqrt(3).
    assert float(fused.std()) == pytest.approx(1 / 16 / 3**0.5, rel=0.01)
    assert torch.equal(tensors["layers.0.post_attention_layernorm.weight"], torch.ones(128))
    assert torch.equal(tensors["fc.bias"], torch.zeros(128))


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_new_head(MODEL, tmp_path / folder, seed=seed)
    first, again, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert first == again != other


def test_the_command_says_what_it_wrote_and_refuses_to_write_over_it(
    tmp_path: Path,
) -> None:
    arguments = ["new-head", str(MODEL), str(tmp_path / "head"), "--seed", "4"]
    status, said = tool(*arguments)
    assert (status, "a head of 229632 numbers" in said) == (0, True)
    status, said = tool(*arguments)
    assert (status, "has model.safetensors already" in said) == (2, True)


@pytest.mark.parametrize(
    ("config", "reason"),
    [(None, "has no config.json"), ({"hidden_size": 8}, "names no num_attention_heads")],
)
def test_a_folder_without_a_models_sizes_is_refused(
    tmp_path: Path, config: object, reason: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    status, said = tool("new-head", str(tmp_path), str(tmp_path / "head"))
    assert (status, reason in said) == (2, True), said
    assert not (tmp_path / "head").exists()


def test_a_head_of_another_model_is_refused_by_the_size_that_differs(tmp_path: Path) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"vocab_size": 96}))
    write_new_head(tmp_path / "other", tmp_path / "head", seed=0)
    check_draft_folder(Speculation(head=str(tmp_path / "head")), model=tmp_path / "other")
    with pytest.raises(ConfigurationError, match="vocabulary_size 96, the model has 704"):
        check_draft_folder(Speculation(head=str(tmp_path / "head")), model=MODEL)


def test_the_heads_folder_is_looked_for_where_the_run_was_started() -> None:
    values = {
        **tomllib.loads((MODEL.parent / "run.toml").read_text()),
        "speculation": {"head": "heads/first"},
    }
    made = configuration(values, run="r", folder=PurePath("/work"))
    assert made.speculation is not None
    assert made.speculation.head == "/work/heads/first"


def test_a_small_model_that_guesses_must_have_the_policys_vocabulary(tmp_path: Path) -> None:
    small = Speculation(model=str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"^speculation\.model: .* has no weights"):
        check_draft_folder(small, model=MODEL)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"^speculation\.model: .* has no config\.json$"):
        check_draft_folder(small, model=MODEL)
    config = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 96}))
    with pytest.raises(ConfigurationError, match="vocabulary_size 96, the model has 704"):
        check_draft_folder(small, model=MODEL)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    check_draft_folder(small, model=MODEL)


def test_the_small_models_folder_is_looked_for_where_the_run_was_started() -> None:
    values = {
        **tomllib.loads((MODEL.parent / "run.toml").read_text()),
        "speculation": {"model": "small"},
    }
    made = configuration(values, run="r", folder=PurePath("/work"))
    assert made.speculation == Speculation(model="/work/small")
