"""Messages between a `GraderProcess` and its worker: a length, then the encoded message.

Answers to Grade come in any order.

Those to the worker are JSON, because tasks may hold integers of any size. Those from it are
MessagePack, because graders may return NaN.
"""

import msgspec
from msgspec import Struct

from forgemq_contracts.grading import GradingEpisode
from forgemq_reward.core.verdict import Verdict

LENGTH_BYTES = 4


class QueueFunctions(Struct, frozen=True, kw_only=True):
    """The functions of one queue as `module:function`; "" if the queue names none."""

    domain: str
    outcome: str
    process: str
    speed: str

    @property
    def names(self) -> tuple[str, ...]:
        """The functions that the queue names."""
        return tuple(name for name in (self.outcome, self.process, self.speed) if name)


class Load(Struct, frozen=True, kw_only=True, tag="load"):
    """The first message to the worker: what to import, and from which folders."""

    code_paths: tuple[str, ...]
    queues: tuple[QueueFunctions, ...]


class Loaded(Struct, frozen=True, kw_only=True, tag="loaded"):
    """The answer to Load: the version of each domain's code, or why an import failed."""

    versions: tuple[tuple[str, str], ...] = ()
    async_domains: tuple[str, ...] = ()  # with at least one `async` function
    error: str = ""


class Grade(Struct, frozen=True, kw_only=True, tag="grade"):
    """Asks the worker to grade one episode; `number` is of this process and never used again."""

    number: int
    episode: GradingEpisode


class Cancel(Struct, frozen=True, kw_only=True, tag="cancel"):
    """Asks the worker to give a grading up; it answers that grading all the same."""

    number: int


class Waiting(Struct, frozen=True, kw_only=True, tag="waiting"):
    """Says of a grading that others hold it up, or that they do so no more."""

    number: int
    is_waiting: bool


class Graded(Struct, frozen=True, kw_only=True, tag="graded"):
    """The answer to Grade: what the functions returned."""

    number: int
    verdict: Verdict


ToWorker = Load | Grade | Cancel
FromWorker = Loaded | Waiting | Graded


def frame_to_worker(message: ToWorker) -> bytes:
    """Encode a message with its length."""
    return _frame(msgspec.json.encode(message))


def frame_from_worker(message: FromWorker) -> bytes:
    """Encode a message with its length."""
    return _frame(msgspec.msgpack.encode(message))


def to_worker(payload: bytes) -> ToWorker:
    """Decode a message."""
    return _TO_WORKER.decode(payload)


def from_worker(payload: bytes) -> FromWorker:
    """Decode a message."""
    return _FROM_WORKER.decode(payload)


def _frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


_TO_WORKER: msgspec.json.Decoder[ToWorker] = msgspec.json.Decoder(ToWorker)
_FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
