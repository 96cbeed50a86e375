"""A run: its whole configuration as data, and how it ended.

The defaults are the method's (design: CISPO, arXiv 2506.13585; windowed FIFO, arXiv 2605.26494);
a run's file overrides them. Combinations that cannot work are refused by `run_rules.check`.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from forgemq_contracts.checkpoint_share import CheckpointShare
from forgemq_contracts.curriculum import Curriculum
from forgemq_contracts.distillation import Distillation
from forgemq_contracts.domain_settings import DomainRewards, DomainSampling
from forgemq_contracts.episodes import HistoryPolicy, Sampling, StreamPolicy
from forgemq_contracts.fields import (
    DomainName,
    ExpertRanks,
    NamedValue,
    ShardRanks,
    TimeMs,
    TreeTokensMax,
)
from forgemq_contracts.gaps import Audit
from forgemq_contracts.lane_engines import LaneEngines
from forgemq_contracts.live_key import LiveKey
from forgemq_contracts.lora import Lora
from forgemq_contracts.loss import Loss
from forgemq_contracts.pool import Pool
from forgemq_contracts.read_tasks import ReadTasks
from forgemq_contracts.repetition import RepetitionStop
from forgemq_contracts.speculation import Speculation
from forgemq_contracts.stages import Stage
from forgemq_contracts.supervised import Supervised
from forgemq_contracts.updates import Updates

RunId: TypeAlias = Annotated[
    str, Meta(pattern=r"^[a-z0-9-]{1,40}$", description="Prefix of the run's topics and blobs.")
]
FunctionName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*)?$",
        description="module:function on the run's code paths; '' for none.",
    ),
]

ENGINE_QUANTIZATIONS = ("none", "fp8_blocks")
"""How engines may hold the projections of a model: as the trainer does, or as 8-bit floats with a
scale for each block of 128 x 128."""


class Queue(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One task domain: where its tasks come from, and its windowed FIFO."""

    domain: DomainName
    task_source: Annotated[
        FunctionName, Meta(description="(seed, domain, k) -> task as JSON-able value; pure.")
    ]
    agent: Annotated[
        FunctionName,
        Meta(
            description="async (Episode) -> None; plays one episode. Or verifiers:NAME: an "
            "environment of the package verifiers, with its tasks and rewards. Without agent and "
            "task_source the groups come from outside, by POST /v1/groups."
        ),
    ]
    task_file: Annotated[
        str,
        Meta(description="In place of a task_source: JSONL, Parquet, or a folder of such files."),
    ] = ""
    held_out_file: Annotated[
        str, Meta(description="With a task_file: the tasks of evaluation, in their order.")
    ] = ""
    task_split: Annotated[str, Meta(description="If it is a folder with splits; '': train.")] = ""
    held_out_split: Annotated[str, Meta(description="As task_split; '': test.")] = ""
    outcome: Annotated[FunctionName, Meta(description="Grader of the outcome.")] = ""
    process: Annotated[FunctionName, Meta(description="Grader of each completion.")] = ""
    speed: Annotated[FunctionName, Meta(description="Grader of the completion time.")] = ""
    group_size: Annotated[int, Meta(ge=1, le=4096, description="G, rollouts per task.")] = 16
    groups_per_step: Annotated[
        int,
        Meta(
            ge=1,
            description="P, groups an optimizer step. With stages, the sum over the queues is what "
            "a stage divides.",
        ),
    ] = 32
    slots: Annotated[int, Meta(ge=1, description="N, groups in generation at once.")] = 64
    window: (
        Annotated[int, Meta(ge=1, description="W, in queue indices; None: 0.3 N rounded up.")]
        | None
    ) = None
    staleness_max: (
        Annotated[int, Meta(ge=0, description="Groups staler than this retire; None: G3's bound.")]
        | None
    ) = None
    group_deadline_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Counts from the group's first claim. Then its unfinished episodes are "
            "masked and it is scored; if that takes as long again, it expires.",
        ),
    ] = 3600.0
    claim_deadline_s: Annotated[
        float,
        Meta(gt=0, description="An admitted group expires if no agent claims an episode of it."),
    ] = 86_400.0
    groups_requested_max: Annotated[
        int, Meta(ge=1, description="Requested, not yet admitted; above it: 429.")
    ] = 4096
    history: (
        Annotated[HistoryPolicy, Meta(description="None: as `episodes.history` says.")] | None
    ) = None
    stream: StreamPolicy = "recorded"
    context_tokens_max: (
        Annotated[int, Meta(ge=2, description="At most that of the model; None: as the model's.")]
        | None
    ) = None
    rewards: DomainRewards | None = None
    sampling: DomainSampling | None = None
    curriculum: (
        Annotated[Curriculum, Meta(description="None: task 0, 1, 2, ... or passes over the file.")]
        | None
    ) = None
    supervised: (
        Annotated[Supervised, Meta(description="None: its imports are kept and never train.")]
        | None
    ) = None


class Evaluation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A fixed set of held-out tasks, played sampled and greedy."""

    tasks: Annotated[int, Meta(ge=0, description="Per domain; 0 switches evaluation off.")] = 0
    task_offset: Annotated[
        int, Meta(ge=0, description="First task number of the held-out range.")
    ] = 1_000_000
    every_steps: Annotated[
        int, Meta(ge=0, description="0: only of the base model and after the last step.")
    ] = 0
    sampled: bool = True
    greedy: bool = True


class Rewards(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """r = alpha * process + beta * speed + outcome; advantages within the group."""

    alpha: float = 1.0
    beta: float = 0.1
    baseline: Literal["mean", "leave_one_out"] = "mean"
    advantage_scale: Annotated[
        Literal["none", "group_std"],
        Meta(description="group_std: divide by the standard deviation of the group's returns."),
    ] = "none"
    discount: Annotated[
        float,
        Meta(gt=0, le=1, description="A reward counts this times less for each turn before it."),
    ] = 1.0
    group_min_fraction: Annotated[
        float, Meta(gt=0, le=1, description="Scored episodes below max(2, this * G): failed.")
    ] = 0.5
    shuffle_returns: Annotated[
        bool, Meta(description="Control experiment: deal the group's returns out at random.")
    ] = False
    grader_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    truncated: Annotated[
        Literal["grade", "zero", "mask", "no_loss"],
        Meta(
            description="What an episode earns if a limit ended it (context full, too many turns). "
            "grade: what the reward functions return. zero: 0, without asking them. mask: nothing; "
            "it counts in no baseline; evaluations grade it. no_loss: as grade, but none of its "
            "completions trains."
        ),
    ] = "grade"


class Episodes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Leases and attempts of episodes, and the sampling they pin."""

    sampling: Sampling = Sampling()
    history: HistoryPolicy = "append_only"
    lease_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Renewed by traffic or heartbeat; if it lapses the next attempt begins.",
        ),
    ] = 60.0
    attempts_max: Annotated[int, Meta(ge=1, le=100)] = 3
    request_deadline_s: Annotated[float, Meta(gt=0)] = 900.0
    repetition_stop: RepetitionStop = RepetitionStop()
    concurrent_max: Annotated[
        int, Meta(ge=1, description="Episodes that the agents play at once.")
    ] = 64


class Model(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The model that is trained."""

    path: Annotated[str, Meta(min_length=1, description="Folder in Hugging Face format.")]
    context_tokens_max: Annotated[int, Meta(ge=2, description="Context and output together.")] = (
        196_608
    )
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    renderer: Annotated[
        str, Meta(description="Name in the `renderers` package; auto: by the tokenizer's folder.")
    ] = "auto"
    engine_quantization: Annotated[
        str,
        Meta(
            description="none, or fp8_blocks: engines hold projections as float8_e4m3fn with a "
            "scale for each 128 x 128 block. The trainer quantises what it publishes."
        ),
    ] = "none"


class Optimizer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """AdamW; defaults of MiniMax-M1 (arXiv 2506.13585, section 5)."""

    lr: Annotated[float, Meta(gt=0)] = 1e-6
    lr_final_fraction: Annotated[
        float, Meta(ge=0, le=1, description="Linear decay to this share at the last step.")
    ] = 1.0
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Meta(gt=0)] = 1e-15
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    grad_norm_max: Annotated[float, Meta(gt=0)] = 1.0
    skipped_in_a_row_max: Annotated[
        int,
        Meta(
            ge=0,
            description="A step without a finite gradient changes no weight and is counted; more "
            "than this many in a row end the run.",
        ),
    ] = 3


class Trainer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Steps, checkpoints and memory of the trainer."""

    steps: Annotated[int, Meta(ge=1)]
    steps_ahead_max: Annotated[
        int, Meta(ge=0, le=8, description="Steps scheduled ahead of the one in training.")
    ] = 1
    checkpoint_every_steps: Annotated[int, Meta(ge=1)] = 1
    checkpoint_share_max: CheckpointShare = 0.05
    checkpoints_kept: Annotated[int, Meta(ge=1)] = 3
    memory_budget_bytes: Annotated[
        int,
        Meta(
            ge=1, description="Bytes of activations, K/V and gradients; block sizes follow from it."
        ),
    ] = 8_000_000_000
    head_chunk_tokens: Annotated[
        int, Meta(ge=1, description="Rows of logits in memory at once; 1024 to 4096 is usual.")
    ] = 1024
    tree_tokens_max: TreeTokensMax | None = None
    world_size: Annotated[int, Meta(ge=1)] = 1
    shard_ranks: ShardRanks | None = None
    expert_ranks: ExpertRanks = 1
    threads: Annotated[int, Meta(ge=1, description="CPU threads of each rank.")] = 1


class LogLayout(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Partition counts and limits of the log; of the counts only `lanes_max` may grow."""

    group_partitions: Annotated[int, Meta(ge=1, le=4096)] = 16
    lanes: Annotated[int, Meta(ge=1, le=4096, description="Engines with which the run begins.")] = 1
    lanes_max: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=4096,
                description="Engines that the run can have at once: partitions of the lane topics. "
                "None: as many as `lanes`, so that one must be removed before another is added. "
                "May grow at a resume.",
            ),
        ]
        | None
    ) = None
    inline_bytes_max: Annotated[
        int, Meta(ge=1024, description="A larger payload goes to the blob store.")
    ] = 900_000
    keep_for_replay: Annotated[
        bool, Meta(description="Trim nothing: inspect and replay can start at the first record.")
    ] = False


class RunConfiguration(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Everything that decides what a run does; it is in StartedRun, so that a replay has it."""

    run: RunId
    seed: Annotated[int, Meta(ge=0)]
    model: Model
    queues: Annotated[tuple[Queue, ...], Meta(min_length=1)]
    trainer: Trainer
    rewards: Rewards = Rewards()
    episodes: Episodes = Episodes()
    evaluation: Evaluation = Evaluation()
    optimizer: Optimizer = Optimizer()
    loss: Loss = Loss()
    updates: Updates = Updates()
    log: LogLayout = LogLayout()
    audit: Audit = Audit()
    stages: Annotated[
        tuple[Stage, ...],
        Meta(description="By first step, ascending; (): P groups of each queue in every step."),
    ] = ()
    speculation: (
        Annotated[Speculation, Meta(description="None: the engines guess no tokens ahead.")] | None
    ) = None
    lora: Annotated[Lora, Meta(description="None: all weights of the model train.")] | None = None
    pool: (
        Annotated[Pool, Meta(description="None: each engine has its own K/V cache only.")] | None
    ) = None
    distillation: (
        Annotated[Distillation, Meta(description="None: rewards alone make the advantages.")] | None
    ) = None
    lanes: Annotated[
        tuple[LaneEngines, ...],
        Meta(description="Engines of the lanes, lane 0 first; (): one of one GPU for each lane."),
    ] = ()
    live: Annotated[
        tuple[LiveKey, ...], Meta(description="Keys of live traffic; none by default.")
    ] = ()
    code_paths: Annotated[
        tuple[str, ...], Meta(description="Folders with the user's modules, on sys.path.")
    ] = ()
    logic_version: Annotated[
        int,
        Meta(ge=1, description="No effect: each core has its own, which its journal names."),
    ] = 1


class StartedRun(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run began; the newest record of a run id is the one that holds."""

    run: RunId
    configuration: RunConfiguration
    blobs: Annotated[str, Meta(description="fsspec address of the run's blob store.")]
    started_ms: TimeMs
    resumed_from_step: Annotated[
        int, Meta(ge=-1, description="Last step trained before this start; -1 if none was.")
    ] = -1
    changes: Annotated[
        tuple[str, ...],
        Meta(description="What differs from the start before, as `name: before -> after`."),
    ] = ()
    has_blob_folder: Annotated[
        bool, Meta(description="The run's folder below a local `blobs` is made; no write makes it.")
    ] = False
    tasks: Annotated[
        tuple[ReadTasks, ...],
        Meta(description="What its files of tasks had; of those that were read at a start."),
    ] = ()


class EndedRun(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run ended, and how."""

    run: RunId
    reason: Literal["completed", "interrupted", "failed"]
    ended_ms: TimeMs
    detail: str = ""
    results: tuple[NamedValue, ...] = ()
