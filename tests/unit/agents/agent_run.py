"""A run of the agents process against the gateway in memory: its configuration and its parts."""

import asyncio

import msgspec

from forgemq_agents.app import play_run
from forgemq_agents.core.samplers import READY
from forgemq_agents.settings import AgentsSettings
from forgemq_agents.user_code import DomainCode
from forgemq_contracts.curriculum import Curriculum
from forgemq_contracts.run import (
    Episodes,
    Evaluation,
    Model,
    Queue,
    RunConfiguration,
    Trainer,
)
from forgemq_contracts.stages import Stage
from forgemq_telemetry.telemetry import Telemetry
from tests.memory_gateway import Group, MemoryGateway

POOL = 5
CURRICULUM = Curriculum(sampler="success_band", tasks=POOL, explore=0.2)


def configuration(
    *,
    slots: int = 2,
    evaluation: Evaluation | None = None,
    concurrent_max: int = 8,
    stages: tuple[Stage, ...] = (),
    curriculum: Curriculum | None = None,
):
    queue = Queue(
        domain="count",
        task_source="unused:unused",
        agent="unused:unused",
        group_size=2,
        groups_per_step=1,
        slots=slots,
        window=1,
        curriculum=curriculum,
    )
    return RunConfiguration(
        run="r",
        seed=3,
        model=Model(path="m"),
        queues=(queue,),
        trainer=Trainer(steps=4),
        evaluation=evaluation or Evaluation(tasks=2),
        episodes=Episodes(concurrent_max=concurrent_max),
        stages=stages,
    )


def numbered(seed: int, domain: str, k: int, **stage: object) -> dict[str, object]:
    return {"seed": seed, "domain": domain, "k": k, **stage}


def rounds(gateway: MemoryGateway) -> list[str]:
    """Evaluation rounds in the order of their first groups."""
    evaluated = [g for g in gateway.in_order() if g.request.purpose == "eval"]
    return list(dict.fromkeys(g.request.round_name for g in evaluated))


def task_of(group: Group) -> dict[str, object]:
    return msgspec.json.decode(group.request.task)


def attempts(group: Group) -> dict[int, int]:
    """Number of the newest attempt by index."""
    return {index: attempt.number for index, attempt in group.attempts.items()}


async def well(episode) -> None:
    completion = await episode.chat([{"role": "user", "content": str(episode.task["k"])}])
    episode.result = {"said": completion.text}
    episode.virtual_s = 1.5


async def play(
    gateway, agent, *, samples: int = 0, source=numbered, pool: int = POOL, **changes
) -> None:
    run = configuration(**changes)
    settings = AgentsSettings(
        configuration="-",
        gateway_url=gateway.url,
        admin_key="admin",
        poll_s=0.05,
        samples=samples,
    )
    domains = {"count": DomainCode(task_source=source, play=agent)}
    if run.queues[0].curriculum is not None:
        sampler = READY[run.queues[0].curriculum.sampler]
        domains = {"count": DomainCode(numbered, agent, sampler=sampler, pool=pool)}
    telemetry = Telemetry(service="agents")
    async with asyncio.timeout(30):
        await play_run(run, settings, domains, {}, telemetry)
