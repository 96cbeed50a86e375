"""Which curricula a run can have."""

from forgemq_contracts.curriculum import SAMPLERS, Curriculum
from forgemq_contracts.environments import environment_of
from forgemq_contracts.run import RunConfiguration

_FIELDS_OF_SAMPLERS = {
    "success_min": ("success_band",),
    "success_max": ("success_band",),
    "explore": ("success_band", "hardest_first"),
}
"""Fields that only these of the ready samplers read; one of the user's own may read all."""


def check_curricula(configuration: RunConfiguration) -> None:
    """Refuse curricula that cannot work.

    Raises:
        ValueError: Names the field and the rule.
    """
    for queue in configuration.queues:
        own, name = queue.curriculum, f"queues.{queue.domain}.curriculum"
        if own is None:
            continue
        if not queue.agent:
            raise ValueError(f"{name} must be left out if the queue has no agent: it chooses tasks")
        is_environment = environment_of(queue.agent) is not None
        if (queue.task_file or is_environment) and own.tasks is not None:
            given = "agent is an environment" if is_environment else "task_file is given"
            raise ValueError(f"{name}.tasks must be left out if {given}: it says how many")
        if queue.task_source and own.tasks is None:
            raise ValueError(f"{name}.tasks must be given with a task_source: the size of the pool")
        if own.success_min > own.success_max:
            raise ValueError(
                f"{name}.success_min must be at most success_max, got {own.success_min:g} and "
                f"{own.success_max:g}"
            )
        _check_fields_are_read(own, name=name)
        if own.tasks is not None and own.tasks > configuration.evaluation.task_offset:
            raise ValueError(
                f"{name}.tasks must be at most evaluation.task_offset, from where on tasks are "
                f"held out, got {own.tasks} and {configuration.evaluation.task_offset}"
            )


def _check_fields_are_read(own: Curriculum, *, name: str) -> None:
    usual = Curriculum(sampler=own.sampler)
    for field, samplers in _FIELDS_OF_SAMPLERS.items():
        given = getattr(own, field)
        is_read = own.sampler in samplers or own.sampler not in SAMPLERS
        if not is_read and given != getattr(usual, field):
            raise ValueError(
                f"{name}.{field} must be left out if sampler is {own.sampler}: it is for "
                f"{' and '.join(samplers)}, got {given:g}"
            )
