"""A task source over files: a task a line (JSONL) or a row (Parquet, Arrow)."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from forgemq_agents.byte_order_mark import skip_mark
from forgemq_agents.core.task_order import order_of_pass
from forgemq_agents.errors import TaskFileError
from forgemq_agents.task_folder import FORMATS, FORMATS_NAMED, files_of
from forgemq_agents.task_size import size_fault
from forgemq_contracts.half_pairs import without_halves
from forgemq_contracts.run import Evaluation

_PASSES_KEPT = 2
"""Groups are asked for ahead, so two passes over a file overlap."""
_NO_VALUE = (ValueError, TypeError, RecursionError)
"""What a value raises that Python or JSON cannot hold: text that is no UTF-8, for one."""


class TaskFile:
    """Training tasks pass by pass, each pass in an order of its own; held-out tasks in file order.

    Example: with 3 training tasks, task numbers 0 to 2 are these three in one order and 3 to 5 in
    another one; task number `evaluation.task_offset` + 4 is the fifth held-out task. Passes go on
    behind the last one that is played.
    """

    def __init__(
        self,
        training: Sequence[Any],
        held_out: Sequence[Any],
        *,
        evaluation: Evaluation,
        is_pool: bool = False,
    ) -> None:
        """A source of these tasks, JSON-able values; at least one trains.

        Args:
            training: Tasks that train.
            held_out: Tasks of evaluation; the first of them are played.
            evaluation: How many are, and the number of the first.
            is_pool: Task number n is training task n: something else chooses the order.
        """
        self.count = len(training)
        self._is_pool = is_pool
        self._training, self._held_out = training, held_out
        self._evaluation = evaluation
        self._order = lru_cache(maxsize=_PASSES_KEPT)(self._order_of)

    def __call__(self, seed: int, domain: str, number: int) -> Any:  # noqa: ANN401 - a user's value
        """The task of this number."""
        behind = number - self._evaluation.task_offset
        if 0 <= behind < self._evaluation.tasks:
            return self._held_out[behind]
        if self._is_pool:
            return self._training[number]
        if behind >= 0:
            number -= self._evaluation.tasks
        passes, place = divmod(number, len(self._training))
        return self._training[self._order(seed, domain, passes)[place]]

    def _order_of(self, seed: int, domain: str, passes: int) -> Sequence[int]:
        return order_of_pass(len(self._training), seed=seed, domain=domain, number=passes)


def read_tasks(path: Path, *, split: str = "", usual_split: str = "train") -> list[Any]:
    """The tasks of a file, or of the files of a split of a folder, by name.

    Args:
        path: A file, or a folder as `task_folder.py` says.
        split: Of a folder; "" for the usual one, or for all files of a folder without splits.
        usual_split: What is meant if none is named.

    Raises:
        TaskFileError: naming the file, the line or row and what is wrong.
    """
    if path.is_dir():
        files = files_of(path, split=split, usual_split=usual_split)
        return [task for file in files for task in _tasks(file)]
    if split:
        raise TaskFileError(f"{path} is no folder, so it has no splits, got {split!r}")
    return _tasks(path)


def repeated(held_out: Iterable[Any], *, training: Iterable[Any]) -> list[int]:
    """Indices of the held-out tasks that are among those that train, equal in all their fields."""
    known = set(map(_digest, training))
    return [index for index, task in enumerate(held_out) if _digest(task) in known]


def _digest(task: object) -> bytes:
    return blake2b(msgspec.json.encode(task, order="deterministic"), digest_size=16).digest()


def _tasks(path: Path) -> list[Any]:
    if path.suffix not in FORMATS:
        raise TaskFileError(f"{path} must end in {FORMATS_NAMED}")
    try:
        return list(_lines(path)) if path.suffix == ".jsonl" else _rows(path)
    except OSError as error:
        raise TaskFileError(f"{path} cannot be read: {error}") from error


def _lines(path: Path) -> Iterator[Any]:
    decoder = msgspec.json.Decoder()
    with path.open("rb") as file:
        skip_mark(file)
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                task = decoder.decode(without_halves(line))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise TaskFileError(f"{path}, line {number}: {error}") from error
            _check_size(task, place=f"{path}, line {number}")
            yield task


def _rows(path: Path) -> list[Any]:
    try:
        import pyarrow  # type: ignore[import-untyped]  # has no stubs
        from pyarrow import parquet
    except ImportError as error:
        raise TaskFileError(f"{path}: {path.suffix} needs the package pyarrow: {error}") from error
    # Arrow as `save_to_disk` of datasets writes it is a stream, without the table at its end that
    # a file of Arrow has.
    is_stream = path.suffix == ".arrow"
    try:
        if is_stream:
            with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
                table = stream.read_all()
        else:
            table = parquet.read_table(path)
    except pyarrow.ArrowException as error:
        kind = "stream of Arrow" if is_stream else "Parquet file"
        raise TaskFileError(f"{path} is no {kind}: {error}") from error
    try:
        tasks = [_json_value(row) for row in table.to_pylist()]
    except _NO_VALUE as error:
        raise TaskFileError(f"{path}, {_place_of_fault(table)}: {error}") from error
    for number, task in enumerate(tasks):
        _check_size(task, place=f"{path}, row {number}")
    return tasks


def _check_size(task: object, *, place: str) -> None:
    """Refuse a task that no request for a group takes; as it is sent it may be longer than here."""
    if fault := size_fault(msgspec.json.encode(task)):
        raise TaskFileError(f"{place} {fault}")


def _json_value(value: object) -> Any:  # noqa: ANN401 - whatever a column holds
    """The value as JSON has it: dates, decimals and bytes as text."""
    return msgspec.to_builtins(value, enc_hook=_time_text)


def _time_text(value: object) -> str:
    """Text of a time in nanoseconds, which pandas has a class for and msgspec does not take.

    Raises:
        TypeError: it is no time.
    """
    text = getattr(value, "isoformat", None)
    if text is None:
        raise TypeError(f"{type(value).__name__} has no form in JSON")
    return str(text())


def _place_of_fault(table: Any) -> str:  # noqa: ANN401 - pyarrow has no stubs
    """Row, counted from 0, and column of the first value that cannot be taken."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        for row, value in enumerate(column):
            try:
                _json_value(value.as_py())
            except _NO_VALUE:
                return f"row {row}, column {name}"
    raise AssertionError("a table is made of its values")
