"""What the grading loop and its grader processes say to each other, length-prefixed.

To the worker JSON, because tasks may hold integers of any size; from it MessagePack, because
graders may return NaN.
"""

import msgspec
from msgspec import Struct

from forgemq_contracts.grading import GradingEpisode
from forgemq_reward.core.verdict import Verdict

LENGTH_BYTES = 4


class QueueFunctions(Struct, frozen=True, kw_only=True):
    """The functions of one queue as `module:function`, '' for none."""

    domain: str
    outcome: str
    process: str
    speed: str

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are named."""
        return tuple(name for name in (self.outcome, self.process, self.speed) if name)


class Load(Struct, frozen=True, kw_only=True, tag="load"):
    """First to the worker: what to import, and the folders where it is."""

    code_paths: tuple[str, ...]
    queues: tuple[QueueFunctions, ...]


class Loaded(Struct, frozen=True, kw_only=True, tag="loaded"):
    """First from the worker: a version of each domain's code, or why it cannot grade."""

    versions: tuple[tuple[str, str], ...] = ()
    error: str = ""


class Grade(Struct, frozen=True, kw_only=True, tag="grade"):
    """One episode for the worker; a `Verdict` comes back."""

    episode: GradingEpisode


class Graded(Struct, frozen=True, kw_only=True, tag="graded"):
    """From the worker: what the functions returned."""

    verdict: Verdict


ToWorker = Load | Grade
FromWorker = Loaded | Graded


def frame_to_worker(message: ToWorker) -> bytes:
    """Length and bytes of a message."""
    return _framed(msgspec.json.encode(message))


def frame_from_worker(message: FromWorker) -> bytes:
    """Length and bytes of a message."""
    return _framed(msgspec.msgpack.encode(message))


def to_worker(payload: bytes) -> ToWorker:
    """The message in these bytes."""
    return _TO_WORKER.decode(payload)


def from_worker(payload: bytes) -> FromWorker:
    """The message in these bytes."""
    return _FROM_WORKER.decode(payload)


def _framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


_TO_WORKER: msgspec.json.Decoder[ToWorker] = msgspec.json.Decoder(ToWorker)
_FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
