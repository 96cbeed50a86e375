"""Ends a generation that repeats itself: so many tokens in a row, each nearly certain.

A request asks for it in its sampling parameters: `custom_params = {"forgemq_repetition": {"tokens":
3000, "logprob": -0.01005}}`, beside `return_logprob`. SGLang checks whether a request is finished
before it files the log-probability of its newest token. So a run is seen when the next token is
there, which is then dropped: the output ends with the token that made the run long enough. A stop
token or a limit in that next token ends the request first.

Source: MiniMax-M1, arXiv 2506.13585 section 3.2.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

PARAMETER = "forgemq_repetition"
"""Of a request's `custom_params`."""

_STATE = "forgemq_certain_run"
"""Attribute of SGLang's `Req` that holds the run so far."""


class CertainRun(NamedTuple):
    """How many log-probabilities were read, and how many of the last ones were above the bound.

    Example: with 3 tokens and a bound of -0.1, the log-probabilities -2, 0, 0, 0, -3 end the output
    after the fourth token.
    """

    read: int = 0
    length: int = 0

    def after(self, logprobs: Sequence[float], *, tokens: int, logprob: float) -> "CertainRun":
        """The run after these log-probabilities, up to the one that makes it long enough.

        Args:
            logprobs: Of all output tokens so far, those that were read among them.
            tokens: That make a run long enough, at least 1.
            logprob: Each of them is above this, nats.
        """
        read, length = self
        if read > len(logprobs):  # SGLang began the output again.
            read = length = 0
        while read < len(logprobs) and length < tokens:
            length = length + 1 if logprobs[read] > logprob else 0
            read += 1
        return CertainRun(read, length)


class _Logprobs(Protocol):
    output_token_logprobs_val: list[float] | None


class _Sampling(Protocol):
    custom_params: Mapping[str, object] | None


class _Request(Protocol):
    sampling_params: _Sampling
    logprob: _Logprobs
    finished_reason: object
    finished_len: int | None

    def finished(self) -> bool: ...


def end_repetition(result: None, request: _Request, *_: object, **__: object) -> None:
    """Finish a request whose newest tokens are a run; a hook after SGLang's own checks.

    Args:
        result: SGLang's, None.
        request: SGLang's `Req`, with a newest token whose log-probability is not there yet.
    """
    del result
    asked = (request.sampling_params.custom_params or {}).get(PARAMETER)
    logprobs = request.logprob.output_token_logprobs_val
    if not isinstance(asked, Mapping) or not logprobs or request.finished():
        return
    tokens = int(asked["tokens"])
    before = getattr(request, _STATE, CertainRun())
    run = before.after(logprobs, tokens=tokens, logprob=float(asked["logprob"]))
    setattr(request, _STATE, run)
    if run.length < tokens:
        return
    # Loaded by the process that runs this hook; the other processes need not load it.
    from forgemq_sglang_cpu.repetition_finish import FinishRepetition

    request.finished_reason = FinishRepetition(tokens)
    request.finished_len = run.read
