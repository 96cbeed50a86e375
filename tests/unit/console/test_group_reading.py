"""A group's turns are made beside the event loop, which has the stream and other pages to serve."""

import threading

from forgemq_bus.memory import MemoryLog
from forgemq_console.group_reading import group_reader
from forgemq_contracts.messages import Output
from forgemq_contracts.topics import FINISHED_COMPLETIONS
from forgemq_run_view.view import RunView
from forgemq_shell.records import emit_of
from tests.unit.run_view.synthetic import SyntheticRun, started


async def test_the_tokens_of_a_turn_are_read_in_another_thread_than_the_loop():
    run, view = SyntheticRun().play(steps=1), RunView(started())
    log = MemoryLog(run="r", clock_ms=lambda: 0)
    await log.create_topics({FINISHED_COMPLETIONS.name: 2})
    writer = await log.writer()
    for message in run.of(FINISHED_COMPLETIONS):
        place = {"topic": message.topic, "partition": message.partition}
        await writer.write(emit_of(Output(**place, record=message.record)))
        view.apply(message)
    threads: set[int] = set()

    def text(token: int) -> str:
        threads.add(threading.get_ident())
        return str(token)

    read = group_reader(log, view, token_text=text, episodes_max=9)
    shown = await read("g-0", "g-0.1.0")
    await writer.close()
    await log.close()
    assert shown.episode is not None
    assert [token.text for token in shown.episode.turns[0].context] == ["7", "8", "9"]
    assert threads
    assert threading.get_ident() not in threads
