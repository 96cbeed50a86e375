"""`forgemq merge`, which is tested with a run's adapter in tests/unit/trainer."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from forgemq_launcher.dispatch import run_tool

pytestmark = pytest.mark.slow  # A process that loads torch.


def test_a_folder_without_an_adapter_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    status = run_tool(["merge", str(tmp_path), str(tmp_path / "m")], environ={}, console=console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert (status, f"{tmp_path} has no adapter" in said) == (2, True), said
    assert not (tmp_path / "m").exists()
