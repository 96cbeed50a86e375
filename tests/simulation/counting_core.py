"""A small core that depends on state, order and ticks and refuses bad records; tests the shell."""

from collections.abc import Sequence

import msgspec

from forgemq_contracts import topics
from forgemq_contracts.groups import MergedGroup, RetiredGroup, ScoredGroup
from forgemq_contracts.messages import Event, InvalidRecordError, Output, Tick


class Counts(msgspec.Struct):
    """All state: how often each group was scored, and the running number of outputs."""

    scored: dict[str, int] = {}
    retired: list[str] = []
    written: int = 0
    run_ms: int = 0


class CountingCore:
    """Writes a numbered record for each scored group; every tick past `tick_outputs_ms` too.

    A group that was retired is refused, so that order between two topics matters.
    """

    def __init__(self, *, partition: int = 0, tick_outputs_ms: int | None = None) -> None:
        self._partition = partition
        self._tick_outputs_ms = tick_outputs_ms
        self._state = Counts()

    def handle(self, event: Event) -> Sequence[Output]:
        state = self._state
        if isinstance(event, Tick):
            assert event.run_ms >= state.run_ms, "run time went back"
            step = self._tick_outputs_ms
            is_due = step is not None and event.run_ms // step > state.run_ms // step
            state.run_ms = event.run_ms
            return [self._output("tick", event.run_ms)] if is_due else []
        record = event.record
        if isinstance(record, RetiredGroup):
            state.retired = sorted({*state.retired, record.group_id})
            return []
        assert isinstance(record, ScoredGroup)
        if record.group_id in state.retired:
            raise InvalidRecordError(f"{record.group_id} is retired")
        count = state.scored.get(record.group_id, 0) + 1
        state.scored[record.group_id] = count
        return [self._output(record.group_id, count)]

    def _output(self, group_id: str, count: int) -> Output:
        self._state.written += 1
        return Output(
            topic=topics.MERGED_GROUPS.name,
            partition=self._partition,
            record=MergedGroup(
                group_id=group_id,
                domain="counting",
                purpose="train",
                partition=self._partition,
                loss_tokens=self._state.written,
                tree_tokens=count,
            ),
        )

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(self._state, order="sorted")

    def restore(self, snapshot: bytes) -> None:
        self._state = msgspec.msgpack.decode(snapshot, type=Counts)
