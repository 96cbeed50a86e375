"""Which task of a pool is played next, by what the run knows of each."""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from forgemq_contracts.fields import Version

SAMPLERS = ("success_band", "age", "hardest_first")

SOLVED_OUTCOME_MIN = 0.5
"""An outcome grader returns 1 for success and 0 for failure; partial credit counts from half."""

TaskNumber: TypeAlias = Annotated[
    int, Meta(ge=0, description="What the task source is called with; below `tasks` of the pool.")
]


class Curriculum(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A pool of tasks of one queue, and the function that chooses among them."""

    sampler: Annotated[
        str,
        Meta(
            pattern=r"^(success_band|age|hardest_first|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
            description="success_band, age, hardest_first, or module:function of your own.",
        ),
    ]
    tasks: (
        Annotated[
            int,
            Meta(
                ge=2,
                le=100_000,
                description="Task numbers 0 to this less 1 of the task source; None with a "
                "task_file: all of its tasks, in file order.",
            ),
        ]
        | None
    ) = None
    success_min: Annotated[
        float, Meta(ge=0, le=1, description="success_band: the lowest success that is in it.")
    ] = 0.1
    success_max: Annotated[
        float, Meta(ge=0, le=1, description="success_band: the highest success that is in it.")
    ] = 0.9
    explore: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of choices that go to the task not asked for the longest, so that "
            "what was always or never solved is tried again.",
        ),
    ] = 0.1
    versions: Annotated[
        int,
        Meta(ge=1, description="Results under this many of the newest versions count."),
    ] = 50


class TaskResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one group of a curriculum showed of its task.

    The results of a domain are numbered without gaps by their `index`, whatever partition they are
    on. So the first n of them are the same to every reader.
    """

    index: Annotated[int, Meta(ge=0, description="Groups of the curriculum that were over before.")]
    number: Annotated[int, Meta(ge=0, description="The n of its key '<domain>/<n>'.")]
    task_number: TaskNumber
    version: Annotated[Version, Meta(description="That served when the group was admitted.")]
    scored: Annotated[int, Meta(ge=0, description="Episodes that are not masked.")] = 0
    solved: Annotated[int, Meta(ge=0, description="Those with an outcome of at least 0.5.")] = 0
