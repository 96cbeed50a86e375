"""Which waits of its functions reach the process that grades."""

import asyncio

from forgemq_contracts.grading_waits import heard_by, waiting


async def test_waits_of_several_tasks_are_heard_as_one():
    heard: list[bool] = []
    first, second = asyncio.Event(), asyncio.Event()

    async def wait(event: asyncio.Event) -> None:
        with waiting():
            await event.wait()

    with heard_by(heard.append):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(wait(first))
            tasks.create_task(wait(second))
            await asyncio.sleep(0)
            assert heard == [True]
            first.set()
            await asyncio.sleep(0)
            assert heard == [True]
            second.set()
        assert heard == [True, False]
        with waiting():
            assert heard == [True, False, True]
    assert heard == [True, False, True, False]


async def test_the_waits_of_two_gradings_are_heard_apart():
    heard: dict[str, list[bool]] = {"one": [], "other": []}

    async def grade(name: str) -> None:
        with heard_by(heard[name].append):
            await asyncio.sleep(0)
            if name == "one":
                with waiting():
                    await asyncio.sleep(0)

    await asyncio.gather(grade("one"), grade("other"))
    assert heard == {"one": [True, False], "other": []}


def test_a_wait_that_nobody_hears_is_none():
    with waiting():
        pass
