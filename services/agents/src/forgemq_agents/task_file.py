"""A task source over files: a task a line (JSONL) or a row (Parquet)."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from forgemq_agents.core.task_order import order_of_pass

FORMATS = (".jsonl", ".parquet")
_PASSES_KEPT = 2
"""Groups are asked for ahead, so two passes over a file overlap."""


class TaskFileError(ValueError):
    """A file of tasks cannot be used; the text names it and why."""


class TaskFile:
    """Training tasks pass by pass, each pass in an order of its own; held-out tasks in file order.

    Example: with 3 training tasks, task numbers 0 to 2 are these three in one order and 3 to 5 in
    another one; task number `held_out_from` + 4 is the fifth held-out task.
    """

    def __init__(
        self,
        training: Sequence[Any],
        held_out: Sequence[Any],
        *,
        held_out_from: int,
        is_pool: bool = False,
    ) -> None:
        """A source of these tasks, JSON-able values; at least one trains.

        Args:
            training: Tasks that train.
            held_out: Tasks of evaluation.
            held_out_from: Number of the first of these.
            is_pool: Task number n is training task n: something else chooses the order.
        """
        self.count = len(training)
        self._is_pool = is_pool
        self._training, self._held_out = training, held_out
        self._held_out_from = held_out_from
        self._order = lru_cache(maxsize=_PASSES_KEPT)(self._order_of)

    def __call__(self, seed: int, domain: str, number: int) -> Any:  # noqa: ANN401 - a user's value
        """The task of this number."""
        if number >= self._held_out_from:
            return self._held_out[number - self._held_out_from]
        if self._is_pool:
            return self._training[number]
        passes, place = divmod(number, len(self._training))
        return self._training[self._order(seed, domain, passes)[place]]

    def _order_of(self, seed: int, domain: str, passes: int) -> Sequence[int]:
        return order_of_pass(len(self._training), seed=seed, domain=domain, number=passes)


def read_tasks(path: Path) -> list[Any]:
    """The tasks of a file, or of all such files of a folder by name.

    Raises:
        TaskFileError: naming the file, the line and what is wrong.
    """
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix in FORMATS)
        if not files:
            raise TaskFileError(f"{path} has no file that ends in {' or '.join(FORMATS)}")
        return [task for file in files for task in read_tasks(file)]
    if path.suffix not in FORMATS:
        raise TaskFileError(f"{path} must end in {' or '.join(FORMATS)}")
    try:
        return _rows(path) if path.suffix == ".parquet" else list(_lines(path))
    except OSError as error:
        raise TaskFileError(f"{path} cannot be read: {error}") from error


def _lines(path: Path) -> Iterator[Any]:
    decoder = msgspec.json.Decoder()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise TaskFileError(f"{path}, line {number}: {error}") from error


def _rows(path: Path) -> list[Any]:
    try:
        from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]  # has no stubs
    except ImportError as error:
        raise TaskFileError(f"{path}: Parquet needs the package pyarrow: {error}") from error
    try:
        rows: list[Any] = parquet.read_table(path).to_pylist()
    except ArrowException as error:
        raise TaskFileError(f"{path} is no Parquet file: {error}") from error
    return rows
