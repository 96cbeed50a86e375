"""Dead letters: how a bad record gets one, and what can be read of it afterwards.

For each topic one consumer writes the dead letters (`dead_letters_by` in the registry) and the
others skip the bad record, so one bad record is one letter. Letters are few: all about one topic
are in one partition, whatever partitions the topic has. A transform writes it in the
transaction of its batch. An edge has no transactions: its `DeadLetters` first reads which letters
exist.
"""

import asyncio

import msgspec

from forgemq_bus.bounded_reads import read_to_end
from forgemq_bus.log import Emit, Headers, Log, Place, Record, Writer
from forgemq_contracts import topics
from forgemq_contracts.dead_letters import DeadLetter
from forgemq_contracts.fields import EpisodeId, GroupId
from forgemq_contracts.partitions import group_of_episode
from forgemq_shell.records import GROUP_HEADER, group_in_header
from forgemq_telemetry.telemetry import Telemetry

REASON_CHARACTERS_MAX = 500
"""Enough for a validation error with its path; a reason may quote the sender's bytes at length."""


def dead_letter(record: Record, reason: str) -> Emit:
    """The bad record's key, bytes and headers, and headers with its position, reason and group."""
    position: Headers = (
        ("reason", reason[:REASON_CHARACTERS_MAX].encode(errors="replace")),
        ("topic", record.topic.encode()),
        ("partition", str(record.partition).encode()),
        ("offset", str(record.offset).encode()),
    )
    kept = tuple(header for header in record.headers if header[0] != GROUP_HEADER)
    group = group_of(record)
    group_header: Headers = ((GROUP_HEADER, group.encode()),) if group else ()
    return Emit(
        topic=topics.BY_NAME[record.topic].dlq_name,
        partition=0,
        key=record.key,
        value=record.value,
        headers=kept + group_header + position,
    )


def letter_of(record: Record) -> DeadLetter:
    """What the headers of a record in a dead letter topic say; never raises."""
    # A dict keeps the last header of a name: those that `dead_letter` appended.
    headers = {name: value.decode(errors="replace") for name, value in record.headers}
    return DeadLetter(
        topic=topics.BY_DLQ_NAME[record.topic].name,
        partition=max(_number(headers.get("partition", "")), 0),
        offset=_number(headers.get("offset", "")),
        reason=headers.get("reason", ""),
        group=_valid(headers.get(GROUP_HEADER, ""), GroupId),
    )


def group_of(record: Record) -> str:
    """Id of the group that a bad record is about; "" if nothing names one.

    Tried in order: the header of its writer, its key, and the field `group_id` of its bytes.
    """
    key = record.key.decode(errors="replace")
    field = topics.BY_NAME[record.topic].key
    if not (group := _valid(group_in_header(record) or "", GroupId)):
        if field == "group_id":
            group = _valid(key, GroupId)
        elif field == "episode_id" and _valid(key, EpisodeId):
            group = group_of_episode(key)
    return group or _valid(_readable(record.value).group_id, GroupId)


class DeadLetters:
    """Writes one dead letter for each bad record of an edge's topics, also across its restarts.

    Args:
        log: Read for letters of previous lives.
        writer: Writes the letters.
        service: Letters are written only for topics that the registry gives to this service.
        telemetry: Gets a line for each bad record, and the count of the letters written.
    """

    def __init__(self, log: Log, writer: Writer, *, service: str, telemetry: Telemetry) -> None:
        self._log = log
        self._writer = writer
        self._service = service
        self._telemetry = telemetry
        self._written: dict[str, set[tuple[int, int]]] = {}
        # Two tasks with the same bad record: the second one must see the letter of the first.
        self._writing = asyncio.Lock()

    async def write(self, record: Record, reason: str) -> bool:
        """Write the record's dead letter, unless there is one.

        Returns:
            False if another service writes the dead letters of this topic.
        """
        if topics.BY_NAME[record.topic].dead_letters_by != self._service:
            self._report("bad_record_skipped", record, reason)
            return False
        letter = dead_letter(record, reason)
        async with self._writing:
            if letter.topic not in self._written:
                self._written[letter.topic] = await self._have_letters(letter.place)
            written, source = self._written[letter.topic], (record.partition, record.offset)
            if source not in written:
                await self._writer.write(letter)
                written.add(source)
                self._telemetry.count("transform.bad_records", topic=record.topic)
        self._report("bad_record", record, reason)
        return True

    def forget(self) -> None:
        """Read again which letters there are: another process has written some."""
        self._written.clear()

    def _report(self, event: str, record: Record, reason: str) -> None:
        self._telemetry.event(
            event,
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            reason=reason,
        )

    async def _have_letters(self, place: Place) -> set[tuple[int, int]]:
        """Partition and offset of each bad record of a topic that has a letter."""
        first = await self._log.first_positions([place])
        letters = [
            letter_of(record)
            async for records in read_to_end(self._log, first)
            for record in records
        ]
        return {(letter.partition, letter.offset) for letter in letters}


class _Readable(msgspec.Struct):
    """The field that may still be read of a record that breaks another rule."""

    group_id: str = ""


def _readable(value: bytes) -> _Readable:
    try:
        return _READABLE.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Readable()


def _valid(text: str, kind: object) -> str:
    """The text, or "" if it breaks the rule of its type."""
    try:
        return str(msgspec.convert(text, kind))
    except msgspec.ValidationError:
        return ""


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else -1


_READABLE = msgspec.msgpack.Decoder(_Readable)
