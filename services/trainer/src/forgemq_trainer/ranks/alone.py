"""The only rank of a trainer that is one process: the null object of `Ranks`."""

from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

from forgemq_trainer.ranks.commands import Command
from forgemq_trainer.ranks.ranks import Ranks


class Alone:
    """Takes the calls of `Ranks` that reach other ranks, and has none to reach."""

    rank = 0
    world_size = 1

    def together(self) -> AbstractContextManager[None]:
        """Do nothing: no other rank can be lost."""
        return nullcontext()

    def announce(self, command: Command) -> None:
        """Do nothing, not even encode the command: a step's trees are many megabytes."""

    def close(self) -> None:
        """Do nothing: no process group was joined."""


ALONE = Alone()

AnyRanks: TypeAlias = Ranks | Alone
"""This process among the ranks, or the only one."""
