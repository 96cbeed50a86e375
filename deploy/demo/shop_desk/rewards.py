"""The rewards: for the right total, for speed, and against malformed calls.

Graders do not use what the agent reports about itself: they read outcome and malformed calls from
the sampled text, and the right total follows from the task.
"""

from forgemq_contracts.grading import GradingCompletion, GradingEpisode
from shop_desk.calls import final_number, is_bad, read_calls
from shop_desk.shop import Order, order_of

BAD_CALL_COST = 0.1
BAD_CALLS_COUNTED_MAX = 3
# With `beta` at 1 a right answer stays worth at least 0.5, however slow it was.
SPEED_MIN = -0.5
END_OF_TURN = "<|im_end|>"

# Virtual time of serial work: a turn of the model (0.4 s) and its one call, as in environment.py.
SERIAL_LOOK_UP_S = 1.4
SERIAL_TOTAL_S = 0.7
SERIAL_ANSWER_S = 0.4
SERIAL_NOTE_S = 0.5
# Pages of three lines fit into the context window; a fourth needs a note.
LINES_WITHOUT_NOTE_MAX = 3


def outcome(episode: GradingEpisode) -> float:
    """1 if the last turn is an answer and its last number is the right total, else 0."""
    if not episode.completions:
        return 0.0
    last = episode.completions[-1]
    text = _turn_text(last)
    if last.finish_reason == "length" or read_calls(text):
        return 0.0
    return float(final_number(text) == order_of(episode.task).total)


def process(episode: GradingEpisode) -> list[float]:
    """-0.1 for every malformed call of a turn, at most three; a turn cut short counts as one."""
    return [-BAD_CALL_COST * _bad_calls(completion) for completion in episode.completions]


def speed(episode: GradingEpisode) -> float:
    """1 - virtual time / time of serial work, between -0.5 and 1; 0 for wrong answers.

    The reference is fixed for each task. One taken from the group's own times rewarded haste:
    agents became fast, and success did not rise.
    """
    if outcome(episode) == 0.0:
        return 0.0
    if episode.virtual_s is None:
        raise ValueError(f"episode {episode.episode_id} has no virtual time")
    saved = 1.0 - episode.virtual_s / serial_s(order_of(episode.task))
    return min(1.0, max(SPEED_MIN, saved))


def serial_s(order: Order) -> float:
    """Virtual seconds of an agent that looks items up one after the other, without a mistake."""
    note_s = SERIAL_NOTE_S if len(order.lines) > LINES_WITHOUT_NOTE_MAX else 0.0
    return len(order.lines) * SERIAL_LOOK_UP_S + SERIAL_TOTAL_S + SERIAL_ANSWER_S + note_s


def _bad_calls(completion: GradingCompletion) -> int:
    if completion.finish_reason == "length":
        return 1
    bad = sum(is_bad(call) for call in read_calls(_turn_text(completion)))
    return min(bad, BAD_CALLS_COUNTED_MAX)


def _turn_text(completion: GradingCompletion) -> str:
    return completion.text.removesuffix(END_OF_TURN)
