"""Replies of a judge, kept by what was asked: bounded, in memory or in one file of a machine."""

import sqlite3
from collections import OrderedDict
from contextlib import closing
from pathlib import Path
from typing import Protocol

_BUSY_S = 5.0
"""For another grader process that is writing."""

_CUTS_IN_COUNT_MAX = 100
"""Cuts of a file while it is used `count_max` times."""


class Replies(Protocol):
    """Replies by the key of their question."""

    def get(self, key: str) -> str | None:
        """The reply, which counts as used now; None if it is not kept."""
        ...

    def put(self, key: str, reply: str) -> None:
        """Keep the reply; those that were used longest ago make room."""
        ...


class RepliesInMemory:
    """Of one process, at most `count_max`."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._replies: OrderedDict[str, str] = OrderedDict()

    def get(self, key: str) -> str | None:
        """As the protocol says."""
        if key in self._replies:
            self._replies.move_to_end(key)
        return self._replies.get(key)

    def put(self, key: str, reply: str) -> None:
        """As the protocol says."""
        self._replies[key] = reply
        self._replies.move_to_end(key)
        while len(self._replies) > self._count_max:
            self._replies.popitem(last=False)


class RepliesOnDisk:
    """In a SQLite file that all grader processes of a machine share; it outlives them.

    It has at most a hundredth more than `count_max`: to count 100,000 rows takes 20 ms.

    Raises:
        sqlite3.Error: out of any call: the file cannot be read or written.
    """

    def __init__(self, path: Path, count_max: int) -> None:
        self._path = path
        self._count_max = count_max
        self._uses_between_cuts = max(1, count_max // _CUTS_IN_COUNT_MAX)

    def get(self, key: str) -> str | None:
        """As the protocol says."""
        with closing(self._open()) as database, database:
            row = database.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
            if row is None:
                return None
            self._use(database, key, reply := str(row[0]))
            return reply

    def put(self, key: str, reply: str) -> None:
        """As the protocol says."""
        with closing(self._open()) as database, database:
            self._use(database, key, reply)

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, timeout=_BUSY_S)
        database.execute(
            "CREATE TABLE IF NOT EXISTS replies "
            "(used INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, reply TEXT)"
        )
        return database

    def _use(self, database: sqlite3.Connection, key: str, reply: str) -> None:
        """Write the row again: its number is the newest. Now and then, cut to the newest rows."""
        row = database.execute("REPLACE INTO replies (key, reply) VALUES (?, ?)", (key, reply))
        if (row.lastrowid or 0) % self._uses_between_cuts:
            return
        # Numbers have gaps, since each use takes a new one: rows are counted.
        database.execute(
            "DELETE FROM replies WHERE used IN (SELECT used FROM replies ORDER BY used "
            "LIMIT max(0, (SELECT count(*) FROM replies) - ?))",
            (self._count_max,),
        )
