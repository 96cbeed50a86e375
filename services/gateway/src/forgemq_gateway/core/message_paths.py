"""The paths of messages in one episode: which are known, how deep they are, and what goes on.

A path is known as long as a request or a reply has it. What a request noted is taken back if no
lane has had it: its repetition is then as new as it was, and forks no more than it would have.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import TypeVar

from msgspec import Struct

from forgemq_gateway.core.digests import EMPTY_PATH, path_after
from forgemq_gateway.core.held_bytes import HeldPart

# What a message on a known path takes, measured with 100,000.
_PATH_BYTES = 350

Counted = TypeVar("Counted", bound=Hashable)


class Branch(Struct, frozen=True):
    """Match keys of messages, and the path that they follow."""

    keys: Sequence[str] = ()
    after: bytes = EMPTY_PATH


NO_BRANCH = Branch()


class MessagePaths:
    """A tree of messages; a path is a digest, and each message leads from one to another.

    Args:
        held: What its bytes count in.
    """

    def __init__(self, held: HeldPart) -> None:
        self._held = held
        # Each known path by the one before its last message, and that message.
        self._paths: dict[tuple[bytes | None, str], bytes] = {}
        self._depths: dict[bytes, int] = {EMPTY_PATH: 0}
        self._uses: defaultdict[bytes, int] = defaultdict(int)
        self._next: defaultdict[bytes, int] = defaultdict(int)
        self._ends: defaultdict[int, int] = defaultdict(int)

    @property
    def deepest(self) -> int:
        """Number of messages of the longest request; 0 if there is none."""
        return max(self._ends, default=0)

    def known(self, keys: Sequence[str]) -> list[bytes]:
        """The paths to the leading messages that are known; every one before a reply is."""
        path: bytes | None = EMPTY_PATH
        found = []
        for key in keys:
            path = self._paths.get((path, key))
            if path is None:
                break
            found.append(path)
        return found

    def is_continued(self, path: bytes) -> bool:
        """Whether a known message follows this known path."""
        return path in self._next

    def note(self, branch: Branch) -> bytes:
        """Note the messages of a request behind a known path; returns the path to the last one."""
        path = branch.after
        for key in branch.keys:
            path = self.follow(path, key)
        self._ends[self._depths.get(path, 0)] += 1
        return path

    def follow(self, path: bytes, key: str) -> bytes:
        """Note a message behind a path; by itself, as a reply, it makes no request longer."""
        behind = self._paths.get((path, key))
        if behind is None:
            behind = self._paths[path, key] = path_after(path, key)
            self._depths[behind] = self._depths.get(path, 0) + 1
            self._next[path] += 1
            self._held.grow(_PATH_BYTES)
        self._uses[behind] += 1
        return behind

    def forget(self, branch: Branch) -> list[str]:
        """Take back what was noted once; returns the keys of messages that are known no more."""
        path, steps = branch.after, []
        for key in branch.keys:
            steps.append((path, key))
            path = self._paths[path, key]
        _take(self._ends, self._depths.get(path, 0))
        return [key for before, key in steps if not self._leave(before, key)]

    def _leave(self, path: bytes, key: str) -> bool:
        """Whether others have this message behind this path too."""
        behind = self._paths[path, key]
        if _take(self._uses, behind):
            return True
        del self._paths[path, key]
        del self._depths[behind]
        _take(self._next, path)
        self._held.grow(-_PATH_BYTES)
        return False


def _take(counts: defaultdict[Counted, int], counted: Counted) -> bool:
    """Take one; whether some are left."""
    counts[counted] -= 1
    if counts[counted]:
        return True
    del counts[counted]
    return False
