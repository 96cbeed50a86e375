"""Limits of the transform loop; read from `FORGEMQ_TRANSFORM_*`."""

from typing import Annotated

from msgspec import Meta, Struct


class TransformSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same for every transform service; they change when records are written, not which."""

    batch_linger_s: Annotated[
        float, Meta(ge=0, le=1, description="A batch collects this long after its first record.")
    ] = 0.05
    batch_linger_s_max: Annotated[
        float, Meta(ge=0, le=2, description="Longest time that it collects if commits are slow.")
    ] = 0.2
    commit_share_max: Annotated[
        float,
        Meta(gt=0, le=1, description="Share of its time that a busy task spends on commits."),
    ] = 0.1
    batch_records_max: Annotated[
        int, Meta(ge=1, description="Records in a batch; a task holds one batch at a time.")
    ] = 2000
    batch_bytes_max: Annotated[
        int, Meta(ge=1, description="A batch with this many bytes reads no more.")
    ] = 64_000_000
    read_records_max: Annotated[int, Meta(ge=1, description="Records in a read of the log.")] = 200
    ticks_pending_max: Annotated[
        int, Meta(ge=1, description="Ticks without output held back; more are journalled.")
    ] = 120
    snapshot_every_batches: Annotated[
        int, Meta(ge=1, description="Batches that a restart replays at most.")
    ] = 2000
    snapshot_every_s: Annotated[
        float, Meta(gt=0, description="A snapshot is due after this time too.")
    ] = 60.0
    bad_consecutive_max: Annotated[
        int,
        Meta(ge=0, description="Bad records in a row of one partition; above: the task stops."),
    ] = 20
    bad_fraction_max: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Bad share of a partition's recent records; above: the task stops.",
        ),
    ] = 0.1
    bad_fraction_over_records: Annotated[
        int, Meta(ge=1, description="The share counts once this many were read.")
    ] = 200
    refence_after_s: Annotated[
        float, Meta(gt=0, description="A fenced task that is still assigned starts again.")
    ] = 2.0

    def linger_s(self, *, commit_s: float) -> float:
        """How long a batch collects after its first record, if the last commit took `commit_s`.

        A transaction costs the brokers the same whether it holds one record or many. If they are
        slow, tasks that ask for fewer of them leave the brokers time for everybody's records.
        """
        wanted_s = commit_s * (1.0 / self.commit_share_max - 1.0)
        return max(self.batch_linger_s, min(wanted_s, self.batch_linger_s_max))
