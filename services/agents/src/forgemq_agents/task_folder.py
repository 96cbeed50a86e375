"""Which files of a folder have the tasks of a split, as data sets of Hugging Face are laid out.

train-00000-of-00001.parquet, test-00000-of-00001.parquet     the repository of a data set: here,
                                                              in `data`, or in a folder each
dataset_dict.json, train/data-00000-of-00001.arrow            DatasetDict.save_to_disk
state.json, data-00000-of-00001.arrow                         Dataset.save_to_disk: no splits
a.jsonl, b.parquet                                            no splits: all files are meant
"""

import re
from collections.abc import Iterator
from pathlib import Path

from forgemq_agents.errors import TaskFileError

FORMATS = (".jsonl", ".parquet", ".arrow")
FORMATS_NAMED = ".jsonl, .parquet or .arrow"

_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Words that name a split, and its name. Source: the documentation of `datasets`, "Structure your
repository": words stand between characters that are no letters."""

_WORD = re.compile(rf"(?<![a-z])({'|'.join(_SPLITS)})(?![a-z])", re.IGNORECASE)
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?")
_DISK_SPLITS, _DISK_STATE = "dataset_dict.json", "state.json"


def files_of(folder: Path, *, split: str, usual_split: str) -> list[Path]:
    """The files of the folder with the tasks of a split, by name; all of them if it has no splits.

    Args:
        folder: In one of the layouts above.
        split: Its name; "" for the usual one.
        usual_split: What is meant if none is named.

    Raises:
        TaskFileError: it has no such file or no such split, or a file beside splits is of none.
    """
    files = list(_files(folder))
    if not files:
        raise TaskFileError(f"{folder} has no file that ends in {FORMATS_NAMED}{_near(folder)}")
    splits = sorted({name for name, _ in files})
    if splits == [""]:
        if split:
            raise TaskFileError(f"{folder} has no splits in the names of its files, got {split!r}")
        return [file for _, file in files]
    if stray := [file for name, file in files if not name]:
        raise TaskFileError(
            f"{folder} has the splits {', '.join(splits[1:])}, and {stray[0].name} is of none of "
            "them by its name: name a split in it, or take it away"
        )
    wanted = split or usual_split
    if wanted not in splits:
        raise TaskFileError(
            f"{folder} has the splits {', '.join(splits)} and not {wanted!r}: name one of them "
            "with task_split or held_out_split"
        )
    return [file for name, file in files if name == wanted]


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Its files of tasks, each with its split; "" if its name has none."""
    if (folder / _DISK_STATE).exists():
        yield from (("", file) for file in _within(folder))
        return
    if (folder / _DISK_SPLITS).exists():
        for each in _folders(folder):
            yield from ((each.name, file) for file in _within(each))
        return
    for place in (folder, folder / "data"):
        found = [(_split_of(file.stem), file) for file in _within(place)]
        for each in _folders(place):
            if split := _split_of(each.name):
                found += ((split, file) for file in _within(each))
        if found:
            yield from found
            return


def _split_of(name: str) -> str:
    """The split that a name without its ending has a word of; of a shard all before its number."""
    word = _WORD.search(name)
    if word is None:
        return ""
    shard = _SHARD.fullmatch(name)
    return _SPLITS[word[1].lower()] if shard is None else shard[1]


def _within(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(each for each in folder.iterdir() if each.suffix in FORMATS and each.is_file())


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(each for each in folder.iterdir() if each.is_dir())


def _near(folder: Path) -> str:
    """What to name instead: a data set with several configurations has a folder for each."""
    names = [each.name for each in _folders(folder) if any(_files(each))]
    return f"; name one of its folders {', '.join(names)}" if names else ""
