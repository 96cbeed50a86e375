"""The mark with which some programs begin a file in UTF-8; JSON has no place for it."""

from codecs import BOM_UTF8
from typing import BinaryIO


def skip_mark(file: BinaryIO) -> None:
    """Leave a file that was just opened behind its mark, or at its beginning if it has none."""
    file.seek(len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0)
