"""What an engine says of itself, against what the run needs."""

import json
from pathlib import Path

import pytest

from forgemq_contracts.engine_report import ModelInfo
from forgemq_contracts.run import Model
from forgemq_inference.engine import EngineRefusedError, ServerInfo
from forgemq_inference.limits import check_engine

OF_NO_FOLDER = ModelInfo("0.0", "/elsewhere")


@pytest.mark.parametrize(
    ("named", "held", "needed"),
    [("fp8_blocks", None, "fp8"), ("fp8_blocks", "awq", "fp8"), ("none", "gptq", "none")],
)
async def test_an_engine_in_another_format_than_the_trainer_publishes_is_refused(
    named: str, held: str | None, needed: str
) -> None:
    has = held or "none"
    rule = rf"^model\.engine_quantization is {named}, .* --quantization {needed}; .* is {has}$"
    server, model = ServerInfo(1, 1, quantization=held), Model(path="m", engine_quantization=named)
    with pytest.raises(EngineRefusedError, match=rule):
        await check_engine(server, OF_NO_FOLDER, model=model, url="http://e")


@pytest.mark.parametrize(("named", "held"), [("fp8_blocks", "fp8"), ("none", None)])
async def test_an_engine_in_the_trainers_format_is_taken(named: str, held: str | None) -> None:
    server, model = ServerInfo(1, 1, quantization=held), Model(path="m", engine_quantization=named)
    await check_engine(server, OF_NO_FOLDER, model=model, url="http://e")


def folder_with(config: object, *, at: Path) -> str:
    at.mkdir()
    (at / "config.json").write_text(json.dumps(config))
    return str(at)


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({"vocab_size": 900}, "vocab_size 704, and that of the engine at http://e has 900"),
        ({"text_config": {"vocab_size": 900}}, "vocab_size 704, and that of"),
        ({"hidden_size": 64, "vocab_size": 704}, ""),
        ({"vocab_size": 704, "_name_or_path": "another"}, ""),
        ({}, ""),
        ([], ""),
    ],
)
async def test_an_engine_with_a_model_of_another_size_is_refused_by_the_field(
    held: object, words: str, tmp_path: Path
) -> None:
    """A field that one of them does not name is not compared."""
    model = Model(path=folder_with({"vocab_size": 704}, at=tmp_path / "wanted"))
    info = ModelInfo("0.0", folder_with(held, at=tmp_path / "held"))
    refusal = ""
    try:
        await check_engine(ServerInfo(1, 1), info, model=model, url="http://e")
    except EngineRefusedError as error:
        refusal = str(error)
    assert (words in refusal, bool(refusal)) == (True, bool(words)), refusal
