"""Writes rows into Parquet files of bounded size, with bounded memory."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa  # type: ignore[import-untyped]  # has no stubs
from pyarrow import parquet

from forgemq_episode_files.arrow_rows import SCHEMA, to_arrow
from forgemq_episode_files.rows import EpisodeRow

HELD_TOKENS_MAX = 1_000_000
"""Rows are held until they have so many tokens: some 100 MB as Python numbers."""
HELD_ROWS_MAX = 1000
"""Rows of few tokens have messages too."""
FILE_TOKENS_MAX = 50_000_000
"""Some hundred megabytes: few enough files, and none too large to load alone."""


class EpisodeWriter:
    """Writes `episodes-00000.parquet`, `episodes-00001.parquet` and so on into a folder.

    Lifecycle: in a `with` block, which makes the folder, `write` each row. A file has its name
    once it is whole. An error in the block leaves no unfinished file behind.
    """

    def __init__(
        self,
        folder: Path,
        *,
        held_tokens_max: int = HELD_TOKENS_MAX,
        file_tokens_max: int = FILE_TOKENS_MAX,
    ) -> None:
        self._folder = folder
        self._held_tokens_max = held_tokens_max
        self._file_tokens_max = file_tokens_max
        self._held: list[dict[str, Any]] = []
        self._held_tokens = 0
        self._file_tokens = 0
        self._writer: Any = None
        self.files: list[Path] = []
        self.rows = 0

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._flush()
            self._close_file()
        elif self._writer is not None:
            self._writer.close()
            self._draft.unlink()

    def write(self, row: EpisodeRow) -> None:
        """Add one row."""
        tokens = sum(len(t.context_ids) + len(t.output_ids) for t in row.turns) // 4
        self._held.append(to_arrow(row))
        self._held_tokens += tokens
        self.rows += 1
        if self._held_tokens >= self._held_tokens_max or len(self._held) >= HELD_ROWS_MAX:
            self._flush()

    def _flush(self) -> None:
        """Write what is held as one row group."""
        if not self._held:
            return
        if self._writer is None:
            self._writer = parquet.ParquetWriter(self._draft, SCHEMA, compression="zstd")
        self._writer.write_batch(pa.RecordBatch.from_pylist(self._held, schema=SCHEMA))
        self._file_tokens += self._held_tokens
        self._held, self._held_tokens = [], 0
        if self._file_tokens >= self._file_tokens_max:
            self._close_file()

    def _close_file(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        path = self._folder / f"episodes-{len(self.files):05}.parquet"
        self._draft.replace(path)
        self.files.append(path)
        self._writer, self._file_tokens = None, 0

    @property
    def _draft(self) -> Path:
        return self._folder / "episodes.parquet.draft"
