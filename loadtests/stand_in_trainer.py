"""A trainer that computes nothing; its new versions let slots become free.

It takes every scheduled step, waits for the trees that the step names, and publishes the model's
weights again as the next version.
"""

import asyncio
import json
import time
from hashlib import sha256
from pathlib import Path
from shutil import copytree

from forgemq_bus.log import Log, Place, TransactionWriter, Writer
from forgemq_contracts import topics
from forgemq_contracts.messages import Output
from forgemq_contracts.steps import ScheduledStep, TrainedStep, TrainingMetrics
from forgemq_contracts.weights import PublishedWeights
from forgemq_shell.records import emit_of

_LINEAGE = 1
_READ_S = 0.25
_RECORDS_MAX = 200
_WEIGHTS = "model.safetensors"


class StandInTrainer:
    """Reads scheduled-steps and merged-trees from their starts.

    `run` ends when it is cancelled. `trees` counts the trees that arrived, `steps` the steps.
    Every version has the weights of the folder `model`; versions are written below `folder`.
    """

    def __init__(self, log: Log, *, model: Path, folder: Path, group_partitions: int) -> None:
        """Read nothing yet."""
        self._log = log
        self._model = model
        self._folder = folder
        self._places = [
            Place(topics.SCHEDULED_STEPS.name, 0),
            *(Place(topics.MERGED_TREES.name, number) for number in range(group_partitions)),
        ]
        self._trees: dict[str, str] = {}
        self._waiting: list[ScheduledStep] = []
        self.trees = 0
        self.steps = 0

    async def run(self) -> None:
        """Publish version 0, then train step after step."""
        claim = await self._log.transaction_writer("trainer")
        writer = await self._log.writer()
        reader = await self._log.reader({place: 0 for place in self._places})
        try:
            await self._publish(writer, self._model, version=0)
            while True:
                for record in await reader.read(timeout_s=_READ_S, records_max=_RECORDS_MAX):
                    if record.topic == topics.MERGED_TREES.name:
                        self._trees[record.key.decode()] = sha256(record.value).hexdigest()
                        self.trees += 1
                        continue
                    step = topics.decode(topics.SCHEDULED_STEPS, record.value)
                    assert isinstance(step, ScheduledStep), "the registry says so"
                    self._waiting.append(step)
                while self._waiting and self._has_trees(self._waiting[0]):
                    await self._train(claim, writer, self._waiting.pop(0))
        finally:
            await reader.close()
            await writer.close()
            await claim.close()

    def _has_trees(self, step: ScheduledStep) -> bool:
        return all(group.group_id in self._trees for group in step.groups)

    async def _train(self, claim: TransactionWriter, writer: Writer, step: ScheduledStep) -> None:
        began_s = time.monotonic()
        for group in step.groups:
            found = self._trees.pop(group.group_id)
            if found != group.tree_sha256:
                raise ValueError(
                    f"the tree of {group.group_id} has sha256 {found}, the step says "
                    f"{group.tree_sha256}"
                )
        version = step.step + 1
        weights = await asyncio.to_thread(self._copy, version)
        trained = TrainedStep(
            step=step.step,
            lineage=_LINEAGE,
            group_ids=tuple(group.group_id for group in step.groups),
            failed_group_ids=(),
            metrics=_nothing_computed(step),
            checkpoint_step=step.step,
            duration_s=time.monotonic() - began_s,
            is_last=step.is_last,
        )
        record = emit_of(Output(topic=topics.TRAINED_STEPS.name, partition=0, record=trained))
        await claim.commit(outputs=[record], group="trainer", positions={})
        await self._publish(writer, weights, version=version)
        self.steps += 1

    def _copy(self, version: int) -> Path:
        """A copy of the model's folder whose weights have another checksum."""
        target = self._folder / str(version)
        copytree(self._model, target)
        data = (self._model / _WEIGHTS).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header["__metadata__"] = {"version": str(version)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (target / _WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        return target

    async def _publish(self, writer: Writer, folder: Path, *, version: int) -> None:
        data = await asyncio.to_thread((folder / _WEIGHTS).read_bytes)
        published = PublishedWeights(
            lineage=_LINEAGE,
            version=version,
            sha256=sha256(data).hexdigest(),
            uri=str(folder),
            size_bytes=len(data),
        )
        await writer.write(
            emit_of(Output(topic=topics.PUBLISHED_WEIGHTS.name, partition=0, record=published))
        )


def _nothing_computed(step: ScheduledStep) -> TrainingMetrics:
    """Metrics of a step: its sizes, all else 0."""
    return TrainingMetrics(
        loss=0.0,
        grad_norm=0.0,
        lr=0.0,
        loss_tokens=sum(group.loss_tokens for group in step.groups),
        tree_tokens=sum(group.tree_tokens for group in step.groups),
        request_tokens=sum(group.request_tokens for group in step.groups),
        append_tokens=sum(group.append_tokens for group in step.groups),
        attention_pairs=sum(group.attention_pairs for group in step.groups),
        ratio_mean=1.0,
        ratio_p99=1.0,
        capped_share=0.0,
        logprob_gap_mean=0.0,
        logprob_gap_max=0.0,
        kl_k3=0.0,
        entropy=0.0,
        staleness_max=max(group.staleness for group in step.groups),
        forward_backward_s=0.0,
    )
