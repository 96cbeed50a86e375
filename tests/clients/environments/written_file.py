"""An environment of verifiers 0.4: write a file with the shell of verifiers' own harness."""

import verifiers.v1 as vf

TASK = "Write hello into out.txt and show it."

__all__ = ["WrittenFileTaskset"]


class WrittenFileData(vf.TaskData):
    """One row."""

    wanted: str


class WrittenFileTask(vf.Task[WrittenFileData]):
    """Whether the file has what was asked for."""

    @vf.reward(weight=1.0)
    async def has_written(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        """1.0 for the wanted text."""
        shown = await runtime.run(["cat", "out.txt"], {})
        return float(shown.stdout.strip() == self.data.wanted)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        """Requests of the policy."""
        return float(trace.num_turns)


class WrittenFileTaskset(vf.Taskset[WrittenFileTask]):
    """One task."""

    def load(self) -> list[WrittenFileTask]:
        """The task."""
        return [WrittenFileTask(WrittenFileData(prompt=TASK, wanted="hello"), self.config.task)]


def load_environment() -> vf.Env:
    """With verifiers' chat loop and its shell, in a folder of this machine."""
    return vf.load_environment(
        vf.resolve_env_config(
            {
                "taskset": {"id": __name__},
                "agent": {"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}},
            }
        )
    )
