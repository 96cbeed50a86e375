"""A run of nearly certain tokens ends an output exactly where it is long enough."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forgemq_inference.core.repetition import REPETITION_PARAMETER
from forgemq_sglang_cpu.repetition import PARAMETER, CertainRun, end_repetition

LOGPROBS = st.lists(st.sampled_from([0.0, -0.005, -0.01, -0.02, -3.0]), max_size=40)
BOUND = -0.01


def first_end(logprobs: Sequence[float], tokens: int) -> int | None:
    """How many tokens there are when the first run is long enough; None if none is."""
    for end in range(tokens, len(logprobs) + 1):
        if all(value > BOUND for value in logprobs[end - tokens : end]):
            return end
    return None


def request_of(logprobs: list[float], custom: object) -> Any:
    """A request of SGLang, as far as the hook reads and writes it."""
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=custom),
        logprob=SimpleNamespace(output_token_logprobs_val=logprobs),
        finished_reason=None,
        finished_len=None,
    )
    request.finished = lambda: request.finished_reason is not None
    return request


@given(LOGPROBS, st.integers(1, 6), st.lists(st.integers(1, 5), max_size=40))
def test_the_run_ends_where_it_is_first_long_enough_however_tokens_arrive(
    logprobs: list[float], tokens: int, steps: list[int]
) -> None:
    """Some steps bring several tokens, as speculation does."""
    run, read = CertainRun(), 0
    for step in [*steps, len(logprobs)]:
        read = min(read + step, len(logprobs))
        run = run.after(logprobs[:read], tokens=tokens, logprob=BOUND)
    expected = first_end(logprobs, tokens)
    assert (run.length >= tokens) == (expected is not None)
    assert run.read == (len(logprobs) if expected is None else expected)


def test_an_output_that_begins_again_is_read_from_its_beginning() -> None:
    run = CertainRun().after([0.0] * 4, tokens=9, logprob=BOUND)
    assert run == (4, 4)
    assert run.after([0.0, -1.0, 0.0], tokens=9, logprob=BOUND) == (3, 1)


def test_a_run_that_is_not_long_enough_ends_nothing_and_is_counted_on() -> None:
    """The end itself is a reason of SGLang's, which `test_repetition_stop.py` sees in an engine."""
    request = request_of([-1.0, 0.0, 0.0], {PARAMETER: {"tokens": 9, "logprob": BOUND}})
    end_repetition(None, request, 1)
    assert request.forgemq_certain_run == (3, 2)
    request.logprob.output_token_logprobs_val += [0.0, 0.0]
    end_repetition(None, request, 1)
    assert request.forgemq_certain_run == (5, 4)
    assert not request.finished()


def test_a_request_that_asks_for_no_stop_or_has_ended_is_left_alone() -> None:
    for custom in (None, {}, {"thinking_budget": 3}):
        request = request_of([0.0] * 9, custom)
        end_repetition(None, request, 1)
        assert not request.finished()
    ended = request_of([0.0] * 9, {PARAMETER: {"tokens": 3, "logprob": BOUND}})
    ended.finished_reason = "stop"
    end_repetition(None, ended, 1)
    assert (ended.finished_reason, ended.finished_len) == ("stop", None)


def test_service_and_plug_in_name_the_parameter_alike() -> None:
    assert PARAMETER == REPETITION_PARAMETER
