"""The process that compares answers with `math-verify`; `mathematics.py` asks it.

`main` reads questions on stdin and answers on stdout, a length and then JSON each. Its parent kills
it at the time limit of a comparison; if the parent is gone, the kernel does.
"""

import logging
import os
import resource
import sys

import msgspec
from msgspec import Struct

LENGTH_BYTES = 4
ANSWER_CHARACTERS_MAX = 4096
"""More than any final answer; the expressions of math-verify take long over long texts."""

MEMORY_BYTES_MAX = 2**31
"""Address space; sympy and its parser have 0.3 GB of it."""


CPU_S_MAX = 120
"""Of one comparison; above the time limit that any parent has reason to set."""


class AnswerPair(Struct, frozen=True, kw_only=True):
    """Asks whether what the answer says in the end equals the right one."""

    answer: str
    gold: str


class Compared(Struct, frozen=True, kw_only=True):
    """The answer; with a `gold_fault` the right answer could not be read."""

    is_equal: bool = False
    gold_fault: str = ""


def compared(comparison: AnswerPair) -> Compared:
    """Read both, and compare them."""
    # Here, since the process that asks needs the messages of this module and no sympy.
    from math_verify import parse, verify

    # Without their time limits: those are alarms, which a long operation of C does not hear.
    gold = parse(_as_latex(comparison.gold), parsing_timeout=None, raise_on_error=False)
    if not gold:
        return Compared(gold_fault="no expression is in it")
    answer = parse(comparison.answer, parsing_timeout=None, raise_on_error=False)
    return Compared(is_equal=verify(gold, answer, timeout_seconds=None, raise_on_error=False))


def _as_latex(gold: str) -> str:
    return gold if "$" in gold or "\\boxed" in gold else f"${gold}$"


def _limit_cpu() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + CPU_S_MAX
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def main() -> None:
    """Answer questions until stdin ends."""
    # It warns at each start that its time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    while len(head := sys.stdin.buffer.read(LENGTH_BYTES)) == LENGTH_BYTES:
        payload = sys.stdin.buffer.read(int.from_bytes(head, "big"))
        _limit_cpu()
        try:
            said = compared(msgspec.json.decode(payload, type=AnswerPair))
        except (MemoryError, RecursionError, OverflowError):
            said = Compared()
        payload = msgspec.json.encode(said)
        answers.write(len(payload).to_bytes(LENGTH_BYTES, "big") + payload)
        answers.flush()
