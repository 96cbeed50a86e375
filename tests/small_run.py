"""The smallest run configuration: for tests that need its partition counts and nothing else."""

from forgemq_contracts.run import LogLayout, Model, Queue, RunConfiguration, Trainer


def small_run(*, group_partitions: int, lanes: int = 1, queues: int = 1) -> RunConfiguration:
    return RunConfiguration(
        run="small",
        seed=0,
        model=Model(path="model"),
        queues=tuple(
            Queue(domain=f"d{number}", task_source="", agent="") for number in range(queues)
        ),
        trainer=Trainer(steps=1),
        log=LogLayout(group_partitions=group_partitions, lanes=lanes),
    )
