import re
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from forgemq_settings.environment import SettingsError, parse


class Example(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    token: str
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    wait_s: Annotated[float, Meta(gt=0)] = 1.5
    is_open: bool = False
    mode: Literal["fast", "safe"] = "safe"
    hosts: Annotated[tuple[str, ...], Meta(min_length=1)] = ("a",)
    limit: int | None = None


def parsed(**environ: str) -> Example:
    return parse(Example, prefix="FORGEMQ_X_", environ={"FORGEMQ_X_TOKEN": "t", **environ})


def test_absent_variables_take_the_defaults_and_others_are_not_looked_at():
    assert parsed(PATH="/bin", FORGEMQ_XY_PORT="1") == Example(token="t")


def test_values_are_converted_to_their_types():
    assert parsed(
        FORGEMQ_X_PORT="0",
        FORGEMQ_X_WAIT_S="0.25",
        FORGEMQ_X_IS_OPEN="true",
        FORGEMQ_X_MODE="fast",
        FORGEMQ_X_HOSTS="a, b,",
        FORGEMQ_X_LIMIT="7",
    ) == Example(
        token="t", port=0, wait_s=0.25, is_open=True, mode="fast", hosts=("a", "b"), limit=7
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FORGEMQ_X_PORT", "70000"),
        ("FORGEMQ_X_PORT", "http"),
        ("FORGEMQ_X_WAIT_S", "0"),
        ("FORGEMQ_X_WAIT_S", "inf"),
        ("FORGEMQ_X_WAIT_S", "nan"),
        ("FORGEMQ_X_IS_OPEN", "perhaps"),
        ("FORGEMQ_X_MODE", "slow"),
        ("FORGEMQ_X_HOSTS", ""),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: str):
    with pytest.raises(SettingsError, match=f"^{name}: "):
        parsed(**{name: value})


def test_a_setting_with_a_few_values_says_which_there_are():
    with pytest.raises(SettingsError, match=r"'slow'; must be one of fast, safe$"):
        parsed(FORGEMQ_X_MODE="slow")


def test_an_error_does_not_repeat_a_value_that_may_be_secret():
    with pytest.raises(SettingsError, match=r"^FORGEMQ_X_PORT: Expected `int`, got `str`$"):
        parsed(FORGEMQ_X_PORT="hunter2")


def test_an_unknown_variable_with_the_prefix_is_refused_with_those_there_are():
    with pytest.raises(SettingsError, match=r"^FORGEMQ_X_PROT: no such setting.*FORGEMQ_X_PORT"):
        parsed(FORGEMQ_X_PROT="1")


def test_a_missing_required_variable_is_named():
    with pytest.raises(SettingsError, match=r"^FORGEMQ_X_TOKEN: must be set"):
        parse(Example, prefix="FORGEMQ_X_", environ={})


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30))
def test_any_text_is_a_value_or_a_settings_error(text: str):
    is_port = re.fullmatch(r"\s*[+-]?\d+\s*", text, re.ASCII)
    try:
        assert 0 <= parsed(FORGEMQ_X_PORT=text).port <= 65535
    except SettingsError:
        assert not is_port or not 0 <= int(text) <= 65535 or text != str(int(text))
