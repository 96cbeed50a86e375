"""Dead letters: how a bad record is buried, and what is read of it again.

Of each topic one consumer buries what does not decode (`dead_letters_by` in the registry), the
others pass over it: one bad record, one dead letter. A transform writes it in the transaction of
its batch; an edge has no transactions and uses `DeadLetters`, which looks before it writes.
"""

import asyncio

import msgspec

from forgemq_bus.log import Emit, Headers, Log, Place, Record, Writer
from forgemq_bus.reading import read_to_end
from forgemq_contracts import topics
from forgemq_contracts.dead_letters import DeadLetter
from forgemq_contracts.fields import EpisodeId, GroupId
from forgemq_shell.records import GROUP_HEADER

REASON_CHARACTERS_MAX = 500


def dead_letter(record: Record, reason: str) -> Emit:
    """The bad record's original key and bytes; headers say where it stood, why, and its group."""
    where: Headers = (
        ("reason", reason[:REASON_CHARACTERS_MAX].encode(errors="replace")),
        ("topic", record.topic.encode()),
        ("partition", str(record.partition).encode()),
        ("offset", str(record.offset).encode()),
    )
    own = tuple(header for header in record.headers if header[0] != GROUP_HEADER)
    group = group_of(record)
    named: Headers = ((GROUP_HEADER, group.encode()),) if group else ()
    return Emit(
        topic=topics.BY_NAME[record.topic].dlq_name,
        partition=record.partition,
        key=record.key,
        value=record.value,
        headers=own + named + where,
    )


def letter_of(record: Record) -> DeadLetter:
    """What the headers of a record in a dead letter topic tell; never raises."""
    told = {name: value.decode(errors="replace") for name, value in record.headers}
    return DeadLetter(
        topic=topics.BY_DLQ_NAME[record.topic].name,
        partition=record.partition,
        offset=_number(told.get("offset", "")),
        reason=told.get("reason", ""),
        group=_valid(told.get(GROUP_HEADER, ""), GroupId),
    )


def group_of(record: Record) -> str:
    """Id of the group that a bad record is about, "" where nothing tells one.

    Its writer put it into a header or into the key; else the bytes may still name it.
    """
    told = dict(record.headers).get(GROUP_HEADER, b"").decode(errors="replace")
    key = record.key.decode(errors="replace")
    field = topics.BY_NAME[record.topic].key
    if not (group := _valid(told, GroupId)):
        if field == "group_id":
            group = _valid(key, GroupId)
        elif field == "episode_id" and _valid(key, EpisodeId):
            group = key.rsplit(".", 2)[0]
    return group or _valid(_readable(record.value).group_id, GroupId)


class DeadLetters:
    """Buries bad records of topics that an edge owns, each once, across restarts of the edge.

    Args:
        log: Of the run.
        writer: Writes the letters.
        service: Only topics that the registry gives to it are buried.
    """

    def __init__(self, log: Log, writer: Writer, *, service: str) -> None:
        self._log = log
        self._writer = writer
        self._service = service
        self._buried: dict[Place, set[int]] = {}
        self._turns = asyncio.Lock()

    async def bury(self, record: Record, reason: str) -> bool:
        """Make sure that the record stands in its dead letter topic.

        Returns:
            False where another service buries the records of this topic.
        """
        if topics.BY_NAME[record.topic].dead_letters_by != self._service:
            return False
        letter = dead_letter(record, reason)
        async with self._turns:
            if letter.place not in self._buried:
                self._buried[letter.place] = await self._known(letter.place)
            if record.offset not in self._buried[letter.place]:
                await self._writer.write(letter)
                self._buried[letter.place].add(record.offset)
        return True

    async def _known(self, place: Place) -> set[int]:
        """Offsets of the records that an earlier life of this service buried."""
        first = await self._log.first_positions([place])
        return {
            letter_of(record).offset
            async for records in read_to_end(self._log, first)
            for record in records
        }


class _Readable(msgspec.Struct):
    """What is left to read of a record that breaks another rule."""

    group_id: str = ""


def _readable(value: bytes) -> _Readable:
    try:
        return _READABLE.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Readable()


def _valid(text: str, kind: object) -> str:
    """The text, or "" where it breaks the rule of its type."""
    try:
        return str(msgspec.convert(text, kind))
    except msgspec.ValidationError:
        return ""


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else -1


_READABLE = msgspec.msgpack.Decoder(_Readable)
