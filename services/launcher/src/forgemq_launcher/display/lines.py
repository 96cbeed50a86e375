"""Lines and tables that commands print as they are: no markup, no breaks of their own.

What graders, agents and bad records say may look like rich's markup, such as [/INST] or :smile:.
"""

import msgspec
from rich.console import Console, RenderableType

from forgemq_bus.errors import BlobError


def terminal(*, is_stderr: bool = False) -> Console:
    """The output of this process, or its standard error, on which :smile: in a table is text."""
    return Console(stderr=is_stderr, emoji=False)


def say(console: Console, text: str) -> None:
    """Print one line."""
    console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


def say_json(console: Console, value: object) -> None:
    """Print a value as one line of JSON: a struct as an object, bytes as Base64."""
    say(console, msgspec.json.encode(value).decode())


def show(console: Console, table: RenderableType) -> None:
    """Print a table; brackets in its cells are text too."""
    console.print(table, markup=False)


def left_out(error: BlobError) -> str:
    """That this machine does not reach the run's blobs, and what to set."""
    return f"what lies in the blob store is left out, set FORGEMQ_BLOBS: {error}"
