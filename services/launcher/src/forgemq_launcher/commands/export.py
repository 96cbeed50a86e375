"""`forgemq export`: writes the episodes of a run as Parquet files."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from forgemq_contracts.arrays import unpack_ids
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.run import RunConfiguration
from forgemq_episode_files.conversation import Message
from forgemq_episode_files.rows import Reply, rows_of
from forgemq_episode_files.writing import EpisodeWriter
from forgemq_launcher import exit_status
from forgemq_launcher.commands.run_on_broker import run_to_read
from forgemq_launcher.core.configuration import ConfigurationError
from forgemq_launcher.display.lines import say
from forgemq_launcher.records.scored_groups import scored_groups
from forgemq_launcher.records.sent_replies import sent_reply
from forgemq_launcher.run_folder import RunFolder
from forgemq_rendering import Rendering

CONTEXT_TAIL_BYTES = 4 * 256
"""Parsing an output looks back to the opening of its turn."""


async def export_run(
    folder: RunFolder,
    environ: Mapping[str, str],
    console: Console,
    *,
    to: Path,
    model: Path | None,
) -> int:
    """Write every scored episode of a run, one row each, whether the run is up or down.

    Args:
        folder: Of the run.
        environ: May name a broker and a blob store.
        console: Where to print.
        to: The folder for the files; made, and without Parquet files so far.
        model: Folder with the tokenizer, if the run's own is not here.

    Returns:
        0: all is written. 1: some groups' completions are not kept, and these are left out.

    Raises:
        ConfigurationError: the folder has Parquet files, or the model is not here.
        RunFolderError: the run is not known here and FORGEMQ_KAFKA is not set.
    """
    _check_folder(to)
    unkept = 0
    async with run_to_read(folder, environ) as (log, started):
        reply = await asyncio.to_thread(_reply_of, started.configuration, model)
        with EpisodeWriter(to) as writer:
            async for records in scored_groups(log, started.configuration):
                try:
                    rows = tuple(rows_of(records, run=started.run, reply=reply))
                except KeyError:
                    unkept += 1
                    continue
                for row in rows:
                    writer.write(row)
    say(console, f"{writer.rows} episodes in {len(writer.files)} files in {to}")
    if unkept:
        say(
            console, f"{unkept} groups are left out: their turns are not kept (log.keep_for_replay)"
        )
    return exit_status.FAILED if unkept else exit_status.OK


def _check_folder(to: Path) -> None:
    if to.exists() and (not to.is_dir() or any(to.glob("*.parquet"))):
        raise ConfigurationError(f"--to: {to} must be a folder without Parquet files")


def _reply_of(configuration: RunConfiguration, model: Path | None) -> Reply:
    """What makes the message of a completion, with the tokenizer in this folder.

    Raises:
        ConfigurationError: there is no tokenizer.
    """
    folder = model or Path(configuration.model.path)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigurationError(
            f"--model: {folder} has no tokenizer.json, which the messages are made with"
        )
    rendering = Rendering.load(
        str(folder),
        renderer=configuration.model.renderer,
        history=configuration.episodes.history,
    )

    def reply(completion: FinishedCompletion, tools: Sequence[Message]) -> Message:
        context = unpack_ids(completion.context[-CONTEXT_TAIL_BYTES:])
        return sent_reply(completion, rendering=rendering, context=context, tools=tools)

    return reply
