"""Lines and tables that commands print as they are: no markup, no breaks of their own.

What graders, agents and bad records say may look like rich's markup, such as [/INST].
"""

from rich.console import Console, RenderableType

from forgemq_bus.errors import BlobError


def say(console: Console, text: str) -> None:
    """Print one line."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def show(console: Console, table: RenderableType) -> None:
    """Print a table; brackets in its cells are text too."""
    console.print(table, markup=False)


def left_out(error: BlobError) -> str:
    """That this machine does not reach the run's blobs, and what to set."""
    return f"what lies in the blob store is left out, set FORGEMQ_BLOBS: {error}"
