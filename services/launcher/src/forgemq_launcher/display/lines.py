"""Lines that commands print as they are: no markup, no colours, no breaks of their own."""

from rich.console import Console

from forgemq_bus.errors import BlobError


def say(console: Console, text: str) -> None:
    """Print one line."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def left_out(error: BlobError) -> str:
    """That this machine does not reach the run's blobs, and what to set."""
    return f"what lies in the blob store is left out, set FORGEMQ_BLOBS: {error}"
