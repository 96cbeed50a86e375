"""The result of a load test: one question, its conditions, and rows of measured values."""

import argparse
import json
import os
import platform
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

THRESHOLDS = Path(__file__).parent / "thresholds.toml"


@dataclass(kw_only=True)
class Measurement:
    """Collects rows; `finish` prints the table and writes the JSON.

    Attributes:
        name: Name of the load test's file without .py, and of its section in thresholds.toml.
        question: The sentence that the rows answer.
        conditions: The workload and the machine, as text by name.
        rows: (case, metric, value, unit).
        cores: That this process may use when the test begins.
    """

    name: str
    question: str
    conditions: dict[str, str] = field(default_factory=dict)
    rows: list[tuple[str, str, float, str]] = field(default_factory=list)
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    def row(self, case: str, metric: str, value: float, unit: str) -> None:
        """Add one measured value."""
        self.rows.append((case, metric, value, unit))

    def finish(self, json_path: str | None) -> int:
        """Print the table and write the JSON.

        Returns:
            The exit status: 1 if a value is beyond its threshold, 2 if nothing was measured.
        """
        self.conditions |= {
            "cores": str(self.cores),
            "machine": platform.machine(),
            "python": platform.python_version(),
        }
        sys.stdout.write(self.table())
        if json_path:
            Path(json_path).write_text(json.dumps(self.document(), indent=2) + "\n")
        if not self.rows:
            sys.stdout.write("nothing was measured: there is no such case\n")
            return 2
        broken = self.broken_thresholds()
        for line in broken:
            sys.stdout.write(f"beyond its threshold: {line}\n")
        return 1 if broken else 0

    def document(self) -> dict[str, object]:
        """The measurement as a value that JSON can hold."""
        names = ("case", "metric", "value", "unit")
        return {
            "question": self.question,
            "conditions": self.conditions,
            "rows": [dict(zip(names, row, strict=True)) for row in self.rows],
        }

    def table(self) -> str:
        """The rows as aligned text."""
        cells = [
            (case, metric, f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}", unit)
            for case, metric, value, unit in self.rows
        ]
        cells.insert(0, ("case", "metric", "value", "unit"))
        widths = [max(len(row[column]) for row in cells) for column in range(4)]
        lines = [
            "  ".join(
                cell.rjust(width) if column == 2 else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        head = [self.question, *(f"  {key}: {value}" for key, value in self.conditions.items())]
        return "\n".join([*head, "", *lines, ""])

    def broken_thresholds(self) -> list[str]:
        """One line for each row beyond its limit in thresholds.toml."""
        wanted = tomllib.loads(THRESHOLDS.read_text()).get(self.name, {})
        limits = {
            (case, metric): limit
            for case, metrics in wanted.items()
            for metric, limit in metrics.items()
        }
        broken = (
            _broken(value, limits.get((case, metric)), name=f"{case} {metric}")
            for case, metric, value, _ in self.rows
        )
        return [line for line in broken if line]


def _broken(value: float, limit: float | Mapping[str, float] | None, *, name: str) -> str:
    """What is wrong with a value; '' if nothing is. A number is the least, a table the most."""
    if isinstance(limit, Mapping):
        most = limit["at_most"]
        return f"{name} = {value:.4g}, at most {most}" if value > most else ""
    if limit is not None and value < limit:
        return f"{name} = {value:.4g}, at least {limit}"
    return ""


def arguments(description: str, *, flags: Mapping[str, str] | None = None) -> argparse.Namespace:
    """Parse what every load test takes: --json FILE, and --case NAME any number of times.

    Args:
        description: What --help says first.
        flags: Further switches of this load test, and what each does.
    """
    parser = parser_of(description)
    for name, effect in (flags or {}).items():
        parser.add_argument(f"--{name}", action="store_true", help=effect)
    return parser.parse_args()


def parser_of(description: str) -> argparse.ArgumentParser:
    """The parser of `arguments`, for a load test that takes values of its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--case", action="append", help="run only this case")
    return parser
