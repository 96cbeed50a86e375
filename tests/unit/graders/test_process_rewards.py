"""Values of the ready process rewards."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts.grading import GradingCompletion, GradingEpisode
from forgemq_graders import language_mixing, malformed_calls, overlong, repetition, weighted


def completion(
    text: str = "", *, before: object = (), malformed: int = 0, tokens: int = 1
) -> GradingCompletion:
    return GradingCompletion(
        completion_id="0" * 32,
        sequence=0,
        text=text,
        message={"role": "assistant", "content": text},
        messages_before=before,
        malformed_tool_calls=malformed,
        output_tokens=tokens,
        finish_reason="stop",
    )


def episode(*completions: GradingCompletion) -> GradingEpisode:
    return GradingEpisode(
        episode_id="g-1.0.0",
        domain="d",
        task={},
        result=None,
        completions=completions,
        rewards=(),
        engine_s=1.0,
        tool_s=0.0,
        virtual_s=None,
        duration_s=1.0,
    )


def user(text: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": text}]


def test_a_completion_with_malformed_calls_costs_one_however_many_there_are():
    played = episode(completion(), completion(malformed=1), completion(malformed=3))
    assert malformed_calls(played) == [0.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b c d e f", 0.0),
        ("a b a b a b", -0.6),  # Runs: ab ba ab ba ab, of which two are first ones.
        ("a a a a a a", -0.8),
        ("a b", 0.0),
        ("", 0.0),
        ("!!!!!!", -0.8),
        ("\u597d\u597d\u597d\u597d\u597d\u597d", -0.8),  # A script without spaces.
    ],
)
def test_repetition_is_the_share_of_runs_that_were_said_before(text, expected):
    assert repetition(words=2)(episode(completion(text))) == [pytest.approx(expected)]


@given(st.text(max_size=200), st.integers(1, 5))
def test_repetition_of_any_text_is_from_minus_one_to_zero(text, words):
    (value,) = repetition(words=words)(episode(completion(text)))
    assert -1 < value <= 0


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (80, 0.0), (85, -0.25), (100, -1.0), (10_000, -1.0)]
)
def test_overlong_falls_evenly_over_the_buffer(tokens, expected):
    reward = overlong(tokens_max=100, buffer_tokens=20)
    assert reward(episode(completion(tokens=tokens))) == [expected]


def test_letters_of_a_script_that_nobody_wrote_before_cost_their_share():
    played = episode(
        completion("yes \u0434\u0430", before=user("say yes")),  # 2 of 5 letters.
        completion("\u0434\u0430", before=user("\u0434\u0430?")),
        completion("x = 2\u03b1 + 3", before=[]),  # Greek, as in formulas.
        completion("42"),
    )
    assert language_mixing(played) == [-0.4, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{x=2}",
        r"\boxed{\frac{ab}{\sqrt{cd}} \text{ cm}}",
        r"\textbf{5}",
        r"$ab = \sin(cd)$",
        r"$$ab$$ \(cd\) \[ef\]",
        "\\begin{align*}\nab &= cd\n\\end{align*}",
        "\u8bbex\u4e3a2, y = 3x",
    ],
)
def test_mathematics_is_no_language(text):
    """Nor does that of the question allow its letters."""
    chinese = "\u6c42$ab$\u7684\u503c, \\frac12 x"
    assert language_mixing(episode(completion(text, before=user(chinese)))) == [0.0]
    (value,) = language_mixing(episode(completion(f"{text} yes", before=user(chinese))))
    assert value < 0


def test_what_lies_between_two_prices_or_is_not_closed_is_no_mathematics():
    before = user("\u597d")
    texts = ("$5 yes $6", "$ yes $", r"\( yes", r"\boxed{yes", "$yes")
    values = [language_mixing(episode(completion(text, before=before))) for text in texts]
    assert values == [[-1.0]] * len(texts)


@pytest.mark.parametrize(
    "part", [r"\(", r"\[", r"\begin{align}", r"\boxed{", "$", "$a", "$$a", "{"]
)
def test_a_hostile_text_is_read_in_little_time(part):
    text = (r"\boxed{" + part * 100_000)[:200_000]
    began_s = time.process_time()
    language_mixing(episode(completion(text)))
    assert time.process_time() - began_s < 2


def test_what_the_policy_wrote_itself_allows_it_nothing():
    russian = "\u0434\u0430"
    played = episode(completion(russian, before=user("hi")), completion(russian))
    assert language_mixing(played) == [-1.0, -1.0]


def test_kana_allow_the_other_scripts_of_japanese_and_parts_of_content_are_read():
    before = [
        {"role": "user", "content": [{"type": "text", "text": "\u306f\u3044"}, {"type": "image"}]}
    ]
    assert language_mixing(episode(completion("\u597d\u30ab", before=before))) == [0.0]


def test_a_weighted_sum_has_one_value_for_each_completion():
    played = episode(completion(malformed=1, tokens=100), completion(tokens=90))
    reward = weighted((0.1, malformed_calls), (0.5, overlong(tokens_max=100, buffer_tokens=20)))
    assert reward(played) == pytest.approx([-0.6, -0.25])
    assert weighted((1.0, malformed_calls))(episode()) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (weighted, "weighted needs at least one pair"),
        (lambda: repetition(words=0), "words must be at least 1, got 0"),
        (lambda: overlong(tokens_max=10, buffer_tokens=11), r"buffer_tokens must be in 1\.\.10"),
        (lambda: overlong(tokens_max=10, buffer_tokens=0), r"buffer_tokens must be in 1\.\.10"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()
