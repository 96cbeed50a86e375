"""Reads the rows of Parquet files of episodes, a few at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # has no stubs
from pyarrow import parquet

from forgemq_episode_files.arrow_rows import SCHEMA

BATCH_ROWS = 16
"""Rows in memory at once; one of 200,000 tokens takes some 20 MB as Python numbers."""


class FileError(ValueError):
    """A file has no rows of episodes; the text names it, the column and the rule."""


_MAY_LACK = frozenset({"cuts"})
"""Fields that files written before them lack; they are then empty."""


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of one file in their order, for `from_arrow`.

    Raises:
        FileError: it is no Parquet file, a column is missing, unknown or of another type, or a text
            is no UTF-8.
    """
    try:
        with parquet.ParquetFile(path) as file:
            check_columns(path, file.schema_arrow)
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                yield from batch.to_pylist()
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise FileError(f"{path}: no Parquet file: {error}") from error


def row_count(path: Path) -> int:
    """How many rows a file has, without reading them.

    Raises:
        FileError: it is no Parquet file.
    """
    try:
        with parquet.ParquetFile(path) as file:
            return int(file.metadata.num_rows)
    except pa.ArrowException as error:
        raise FileError(f"{path}: no Parquet file: {error}") from error


def check_columns(path: Path, schema: Any) -> None:  # noqa: ANN401 - pyarrow has no stubs
    """Refuse a file whose columns are not those of `SCHEMA`, in whatever order.

    Raises:
        FileError: names the first such column.
    """
    for wanted in SCHEMA:
        index = schema.get_field_index(wanted.name)
        if index < 0:
            raise FileError(f"{path}: column {wanted.name}: is missing")
        found = schema.field(index).type
        if fault := _type_fault(found, wanted.type, field=wanted.name):
            raise FileError(f"{path}: column {fault}")
    unknown = [name for name in schema.names if name not in SCHEMA.names]
    if unknown:
        raise FileError(f"{path}: column {unknown[0]}: no column of episodes has this name")


def _type_fault(found: Any, wanted: Any, *, field: str) -> str:  # noqa: ANN401 - no stubs
    """Which part of a column has another type, and which; "" if none has."""
    if pa.types.is_list(wanted):
        if not (pa.types.is_list(found) or pa.types.is_large_list(found)):
            return f"{field}: must be {wanted}, is {found}"
        return _type_fault(found.value_type, wanted.value_type, field=f"{field}[]")
    if pa.types.is_struct(wanted):
        if not pa.types.is_struct(found):
            return f"{field}: must be {wanted}, is {found}"
        return _struct_fault(found, wanted, field=field)
    is_text = pa.types.is_string(wanted) and pa.types.is_large_string(found)
    # A column without any value has no type of its own.
    if found.equals(wanted) or is_text or pa.types.is_null(found):
        return ""
    return f"{field}: must be {wanted}, is {found}"


def _struct_fault(found: Any, wanted: Any, *, field: str) -> str:  # noqa: ANN401 - no stubs
    names = {each.name for each in found}
    for each in wanted:
        if each.name not in names and each.name in _MAY_LACK:
            continue
        if each.name not in names:
            return f"{field}.{each.name}: is missing"
        own = found.field(each.name).type
        if fault := _type_fault(own, each.type, field=f"{field}.{each.name}"):
            return fault
    known = {each.name for each in wanted}
    unknown = sorted(names - known)
    return f"{field}.{unknown[0]}: no field of episodes has this name" if unknown else ""
