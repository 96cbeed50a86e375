"""An outcome grader for answers of mathematics, over `math-verify`.

An answer is compared in a process of its own with limits on time and memory, since sympy evaluates
what it reads: a tower of powers has no end. A comparison that reaches a limit is no equality.
"""

import asyncio
import contextlib
import resource
import sys
from asyncio.subprocess import PIPE, Process

import msgspec

from forgemq_contracts.grading import GradingEpisode
from forgemq_graders.answers import AsyncOutcome, answer_text, text_of
from forgemq_graders.comparison import (
    ANSWER_CHARACTERS_MAX,
    LENGTH_BYTES,
    MEMORY_BYTES_MAX,
    AnswerPair,
    Compared,
)
from forgemq_graders.turns import in_turn

_START_TIMEOUT_S = 60.0
"""For the imports of sympy, on a busy machine; 1 to 2 s on a quiet one."""


class GoldAnswerError(ValueError):
    """The right answer of a task cannot be read, so no answer can be compared with it."""


class Mathematics:
    """Compares answers, one at a time, in a process that is started again if it ends.

    Args:
        timeout_s: Of one comparison.
    """

    def __init__(self, *, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s
        self._process: Process | None = None
        self._turn = asyncio.Lock()

    async def is_equal(self, answer: str, gold: str) -> bool:
        """Whether what the answer says in the end equals the right one.

        That is what math-verify takes, the last of the first kind that is there: a box, or what
        follows "final answer is"; what follows the word "answer" within 50 characters; LaTeX or a
        number. Several boxes are one set. Units are dropped, and a percent sign may be: 50% equals
        50 and 0.5. False if the answer has no expression, or its comparison reaches a limit.

        Args:
            answer: Only its last 4,096 characters are read; LaTeX in $ or a box, or a number.
            gold: LaTeX, with $ around it or without.

        Raises:
            GoldAnswerError: `gold` cannot be read.
        """
        text = text_of(answer[-ANSWER_CHARACTERS_MAX:])
        comparison = AnswerPair(answer=text, gold=gold)
        async with in_turn(self._turn):
            process = await self._running()
            try:
                async with asyncio.timeout(self._timeout_s):
                    compared = await _ask(process, comparison)
            except (TimeoutError, EOFError, ConnectionError):
                await self._end()
                return False
            except asyncio.CancelledError:
                await self._end()  # Its answer would be taken for that of the next question.
                raise
        if compared.gold_fault:
            raise GoldAnswerError(f"the right answer {gold[:200]!r}: {compared.gold_fault}")
        return compared.is_equal

    async def close(self) -> None:
        """End the process; idempotent."""
        async with self._turn:
            await self._end()

    async def _running(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await _started()
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await _kill(process)


def math_outcome(*, answer: str = "answer", mathematics: Mathematics | None = None) -> AsyncOutcome:
    """An outcome: 1 if the last completion's answer equals `task[answer]`, else 0.

    The function raises, so that the episode is masked, if the task's own answer cannot be read.

    Args:
        answer: The field of the task with the right answer: LaTeX or a number.
        mathematics: Compares; by default one with a limit of 5 s, as long as its process lives.
    """
    comparing = mathematics or Mathematics()

    async def outcome(episode: GradingEpisode) -> float:
        gold = str(episode.task[answer])
        return float(await comparing.is_equal(answer_text(episode), gold))

    return outcome


async def _started() -> Process:
    """A process that has answered a first question."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        # Not by `-m`: the package imports the module, and Python warns of a second one.
        *("-c", "from forgemq_graders.comparison import main; main()"),
        stdin=PIPE,
        stdout=PIPE,
        env={},
    )
    is_ready = False  # Else the first answer would be taken for that of the next question.
    try:
        limit = (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX)
        resource.prlimit(process.pid, resource.RLIMIT_AS, limit)
        async with asyncio.timeout(_START_TIMEOUT_S):
            await _ask(process, AnswerPair(answer="$1$", gold="$1$"))
        is_ready = True
    finally:
        if not is_ready:
            await _kill(process)
    return process


async def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
    if process.stdin is not None:
        process.stdin.close()


async def _ask(process: Process, comparison: AnswerPair) -> Compared:
    """Send a question and read its answer.

    Raises:
        EOFError: the process ended.
    """
    assert process.stdin is not None, "opened with PIPE"
    assert process.stdout is not None, "opened with PIPE"
    payload = msgspec.json.encode(comparison)
    process.stdin.write(len(payload).to_bytes(LENGTH_BYTES, "big") + payload)
    await process.stdin.drain()
    head = await process.stdout.readexactly(LENGTH_BYTES)
    payload = await process.stdout.readexactly(int.from_bytes(head, "big"))
    return msgspec.json.decode(payload, type=Compared)
