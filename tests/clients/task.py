"""The task that every client does: write a file with its own tool, then show it."""

from tests.clients.scripted_model import Call, Step

TASK = "Write hello into out.txt and show it."
WRITE, SHOW, LIST = "echo hello > out.txt", "cat out.txt", "ls"
DONE = Step("All done: the file is written.")


def steps_of(name: str, argument: str, **more: str) -> tuple[Step, ...]:
    """Write the file, then show it."""

    def call(command: str) -> Call:
        return Call(name, {argument: command, **more})

    return (Step("I write it.", (call(WRITE),)), Step("I show it.", (call(SHOW),)), DONE)


def parallel_steps_of(name: str, argument: str, **more: str) -> tuple[Step, ...]:
    """Write the file and list the folder in one turn."""

    def call(command: str) -> Call:
        return Call(name, {argument: command, **more})

    return (Step("I do both.", (call(WRITE), call(LIST))), Step("Now.", (call(SHOW),)), DONE)
