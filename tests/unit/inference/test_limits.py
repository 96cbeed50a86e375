"""What an engine says of itself, against what the run needs."""

import pytest

from forgemq_inference.engine import EngineRefusedError, ServerInfo
from forgemq_inference.limits import check_quantization


@pytest.mark.parametrize(
    ("named", "held", "needed"),
    [("fp8_blocks", None, "fp8"), ("fp8_blocks", "awq", "fp8"), ("none", "gptq", "none")],
)
def test_an_engine_in_another_format_than_the_trainer_publishes_is_refused(
    named: str, held: str | None, needed: str
) -> None:
    has = held or "none"
    rule = rf"^model\.engine_quantization is {named}, .* --quantization {needed}; .* is {has}$"
    with pytest.raises(EngineRefusedError, match=rule):
        check_quantization(ServerInfo(1, 1, quantization=held), named=named, url="http://e")


@pytest.mark.parametrize(("named", "held"), [("fp8_blocks", "fp8"), ("none", None)])
def test_an_engine_in_the_trainers_format_is_taken(named: str, held: str | None) -> None:
    check_quantization(ServerInfo(1, 1, quantization=held), named=named, url="http://e")
