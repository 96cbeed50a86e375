"""Processes that are copies of the one that starts them."""

import multiprocessing
from multiprocessing.queues import SimpleQueue

from forgemq_sglang_cpu.forked import launch


def test_a_launched_process_has_what_its_parent_had_and_later_ones_are_started_as_before() -> None:
    method = multiprocessing.get_start_method()
    answers: SimpleQueue[int] = multiprocessing.SimpleQueue()
    number = 40

    def start(added: int) -> multiprocessing.Process:
        # A new Python could not be given a function inside another.
        process = multiprocessing.Process(target=lambda: answers.put(number + added))
        process.start()
        return process

    process = launch(start, added=2)
    process.join()
    assert answers.get() == 42
    assert multiprocessing.get_start_method() == method
