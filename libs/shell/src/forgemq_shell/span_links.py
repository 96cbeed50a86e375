"""Span links: a span has one parent, so a record about many completions links all their traces."""

from collections.abc import Sequence

import msgspec

from forgemq_bus.decoding import decoded_record
from forgemq_bus.log import Headers, Record
from forgemq_contracts import topics
from forgemq_contracts.episodes import FinishedEpisode
from forgemq_contracts.groups import ScoredGroup
from forgemq_telemetry.traces import completion_trace

_TOPICS = frozenset((topics.FINISHED_EPISODES.name, topics.SCORED_GROUPS.name))


def linked_traces(record: Record) -> Sequence[Headers]:
    """The traces of all completions of a finished episode or a scored group; () for other records.

    Decodes the record: call it only if spans are exported.
    """
    if record.topic not in _TOPICS:
        return ()
    try:
        decoded = decoded_record(record)
    except msgspec.ValidationError:
        return ()
    return completion_traces(decoded)


def completion_traces(record: msgspec.Struct) -> Sequence[Headers]:
    """The traces of all completions that a finished episode or a scored group names."""
    match record:
        case FinishedEpisode(manifest=entries):
            return [completion_trace(entry.completion_id) for entry in entries]
        case ScoredGroup(completions=completions):
            return [completion_trace(completion.completion_id) for completion in completions]
    return ()
