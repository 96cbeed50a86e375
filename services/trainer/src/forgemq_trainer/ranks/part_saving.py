"""Every rank writes its part of the optimizer's state, beside what it does otherwise.

The state changes at an update only. Until the next one, ranks write in a thread each, from the very
memory that holds it, while the next step computes its gradients. The threads communicate through
process groups of their own, so in any order to the computation's. Writing may take long, so while
they write they tell each other every second that they still do: a rank that hangs ends the others.
"""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from forgemq_trainer.ranks.ranks import RankLostError, Ranks
from forgemq_trainer.storage.optimizer_state import StatePart, write_state_part

LOOK_EVERY_S = 1.0
"""While ranks write, each says to the others so often that it is there."""


class _Written(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank wrote, or why it could not."""

    file: str
    sha256: str = ""
    error: str = ""


class PartSaving:
    """One rank's side of saving the optimizer's state.

    Lifecycle: every rank calls `begin`; then rank 0 calls `lead`, when its checkpoint's folder is
    there and at any time before the next update. The others call `finish` before that update.
    """

    def __init__(self, ranks: Ranks, parts: Callable[[], Mapping[str, StatePart]]) -> None:
        """Write nothing yet.

        Args:
            ranks: All of them.
            parts: This rank's part of the state, which no update changes while it is written.
        """
        self._ranks = ranks
        self._parts = parts
        self._following: threading.Thread | None = None
        self._error: RankLostError | OSError | None = None

    def begin(self) -> None:
        """On ranks other than 0, wait in a thread for the folder to write to."""
        if self._ranks.rank > 0:
            self._following = threading.Thread(target=self._follow, name="part saving", daemon=True)
            self._following.start()

    def lead(self, folder: Path) -> dict[str, str]:
        """On rank 0, have every rank write below `folder`; returns the SHA-256 of each file.

        Raises:
            OSError: a rank could not write its part; names it.
            RankLostError: another rank died, or hangs.
        """
        with self._ranks.together():
            self._ranks.tell_saving(str(folder).encode())
            own = self._write_beside_others(folder)
            written = self._ranks.gather_saved(msgspec.json.encode(own))
        found = [msgspec.json.decode(each, type=_Written) for each in written]
        for rank, each in enumerate(found):
            if each.error:
                raise OSError(f"rank {rank} could not write {each.file}: {each.error}")
        return {each.file: each.sha256 for each in found}

    def finish(self) -> None:
        """Wait until this rank's part is written, if it was begun.

        Raises:
            OSError: it could not be written.
            RankLostError: another rank died, or hangs.
        """
        if self._following is not None:
            following, self._following = self._following, None
            following.join()
            if self._error is not None:
                raise self._error

    def _follow(self) -> None:
        try:
            with self._ranks.together():
                folder = Path(self._ranks.tell_saving(b"").decode())
                own = self._write_beside_others(folder)
                self._ranks.gather_saved(msgspec.json.encode(own))
            if own.error:
                self._error = OSError(f"{own.file}: {own.error}")
        except RankLostError as error:
            self._error = error

    def _write_beside_others(self, folder: Path) -> _Written:
        """Write this rank's part and wait for those of all others."""
        written: list[_Written] = []
        # A daemon: if another rank is lost, this process must not end only once this has ended.
        writing = threading.Thread(
            target=lambda: written.append(self._write(folder)), name="part writing", daemon=True
        )
        writing.start()
        are_writing = True
        while are_writing:
            writing.join(LOOK_EVERY_S)
            are_writing = self._ranks.any_saving(is_saving=writing.is_alive())
        (own,) = written
        return own

    def _write(self, folder: Path) -> _Written:
        file = f"optimizer/part-{self._ranks.rank:05d}.safetensors"
        try:
            return _Written(file=file, sha256=write_state_part(folder / file, self._parts()))
        except Exception as error:  # noqa: BLE001  # rank 0 gets it, ends all and names it
            return _Written(file=file, error=f"{type(error).__name__}: {error}")
