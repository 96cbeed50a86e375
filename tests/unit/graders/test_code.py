"""Programs of the policy against the tests of a task, in the real sandbox."""

import pytest

from forgemq_graders import IsolationRefusedError, SandboxLimits, code_tests
from forgemq_graders.answers import answer_code
from tests.unit.graders.episodes import answered

LIMITS = SandboxLimits(time_s=3, cpu_s=2, memory_bytes=2**27, processes=4, output_bytes=10_000)
DOUBLE = "```python\nn = int(input())\nprint(2 * n)\n```"
ADD = "Thus:\n```python\ndef add(a, b):\n    print('adding')\n    return a + b\n```\nDone."
INPUTS = [{"stdin": "2\n", "stdout": "4"}, {"stdin": "-1", "stdout": "-2\n"}]


def calls(*expected: tuple[list[object], object]) -> list[dict[str, object]]:
    return [{"function": "add", "arguments": a, "returns": r} for a, r in expected]


@pytest.mark.slow
async def test_a_program_that_passes_all_tests_earns_one_and_any_other_nothing():
    outcome = code_tests(limits=LIMITS)
    assert await outcome(answered(DOUBLE, task={"tests": INPUTS})) == 1.0
    wrong = DOUBLE.replace("2 * n", "n * n")
    assert await outcome(answered(wrong, task={"tests": INPUTS})) == 0.0
    assert await outcome(answered("no code", task={"tests": INPUTS})) == 0.0
    assert await outcome(answered(task={"tests": INPUTS})) == 0.0


async def test_a_share_of_the_tests_may_be_the_outcome():
    outcome = code_tests(limits=LIMITS, is_share=True)
    squares = DOUBLE.replace("2 * n", "n * n")
    assert await outcome(answered(squares, task={"tests": INPUTS})) == 0.5


async def test_functions_are_called_and_what_they_return_is_compared_outside():
    outcome = code_tests(limits=LIMITS, is_share=True)
    tests = calls(([1, 2], 3), ([0.1, 0.2], 0.3), ([[1], [2]], [1, 2]), (["a", "b"], "ba"))
    assert await outcome(answered(ADD, task={"tests": tests})) == 0.75
    one = "```\ndef add(a, b):\n    return 1\n```"
    assert await outcome(answered(one, task={"tests": calls(([1, 0], True))})) == 0.0


async def test_a_program_may_be_what_the_agent_submitted_instead_of_the_answer():
    outcome = code_tests(limits=LIMITS, program=lambda episode: episode.result["submission"])
    task, said = {"tests": INPUTS}, "I am done."
    right = {"submission": "print(2 * int(input()))"}
    assert await outcome(answered(said, task=task, result=right)) == 1.0
    assert await outcome(answered(DOUBLE, task=task, result={"submission": ""})) == 0.0


async def test_a_program_that_is_no_text_fails_like_any_other():
    """An episode that is masked for it would escape its zero."""
    outcome = code_tests(limits=LIMITS, program=lambda episode: episode.result)
    task = {"tests": INPUTS}
    assert await outcome(answered(task=task, result="print('\ud800')")) == 0.0
    assert await outcome(answered(task=task, result="print(2 * int(input())) # \ud800")) == 1.0


async def test_an_integer_beyond_all_floats_equals_none():
    outcome = code_tests(limits=LIMITS)
    huge = "```\ndef add(a, b):\n    return 10 ** 400\n```"
    assert await outcome(answered(huge, task={"tests": calls(([1, 2], 3.5))})) == 0.0


CHEATS = {
    "ends early": "import os\nos._exit(0)",
    "says it passed": "print('passed')\nprint('4')",
    "looks for the answer": """
import gc, os, sys
def add(a, b):
    found = [o for o in gc.get_objects() if isinstance(o, dict) and "returns" in o]
    files = [name for folder, _, names in os.walk("/tmp") for name in names]
    return found[0]["returns"] if found else files[0] if files else None
""",
    "never ends": "while True:\n    pass",
    "fills memory": "x = [bytearray(2**20) for _ in range(10**6)]",
    "forks": "import os\nwhile True:\n    os.fork()",
    "writes without end": "while True:\n    print('4' * 1000)",
    "kills": "import os, signal\nos.kill(os.getppid(), 9)\nos.kill(0, 9)",
    "equals anything": """
class Any:
    def __eq__(self, other):
        return True
def add(a, b):
    return Any()
""",
    "is no program": "))) \x00",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEATS)
async def test_a_hostile_program_earns_nothing(name):
    outcome = code_tests(limits=LIMITS)
    task = {"tests": calls(([1, 2], 3))}
    assert await outcome(answered(f"```\n{CHEATS[name]}\n```", task=task)) == 0.0


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], "tests of a task must be 1 to 256, got 0"),
        ([{"stdin": "1"}], "missing required field `stdout`"),
        ([{"stdin": "1", "stdout": "1", "args": []}], "unknown field `args`"),
    ],
)
async def test_tests_of_a_task_that_are_wrong_raise_by_name(tests, message):
    with pytest.raises(ValueError, match=message):
        await code_tests(limits=LIMITS)(answered(DOUBLE, task={"tests": tests}))


async def test_a_machine_that_cannot_isolate_raises_and_scores_nothing(tmp_path):
    """A folder that disappears cannot be shown to programs."""
    folder = tmp_path / "library"
    folder.mkdir()
    outcome = code_tests(limits=LIMITS, folders=(str(folder),))
    folder.rmdir()
    with pytest.raises(IsolationRefusedError, match="library: No such file or directory"):
        await outcome(answered(DOUBLE, task={"tests": INPUTS}))


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("a\n```py\nx = 1\n```\nb\n```\ny = '``'\n```\n", "y = '``'\n"),
        ("~~~~\n```\n~~~~", "```\n"),
        ("```python\nx = 1", "x = 1"),
        ("x = 1", "x = 1"),
    ],
)
def test_the_code_of_an_answer_is_its_last_fenced_block_or_all_of_it(content, code):
    assert answer_code(answered("```\nearlier\n```", content)) == code
