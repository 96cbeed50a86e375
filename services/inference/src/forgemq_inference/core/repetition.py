"""How a request asks its engine to end an output that repeats itself."""

import math
from typing import Any

from forgemq_contracts.completions import Constraint
from forgemq_contracts.repetition import RepetitionStop

NO_REPETITION_STOP = RepetitionStop()

REPETITION_PARAMETER = "forgemq_repetition"
"""What ForgeMQ's plug-in of SGLang reads (`forgemq_sglang_cpu.repetition`)."""


def repetition_parameters(stop: RepetitionStop, *, constraint: Constraint | None) -> dict[str, Any]:
    """What is added to SGLang's sampling parameters; nothing if the stop is off.

    A token that a constraint dictates has probability 1, and says nothing of a loop.
    """
    if not stop.tokens or constraint is not None:
        return {}
    bound = {"tokens": stop.tokens, "logprob": math.log(stop.probability)}
    return {"custom_params": {REPETITION_PARAMETER: bound}}
