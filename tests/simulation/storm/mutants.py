"""Small defects, each of which a storm must find: they say what the storm can see.

A mutant is a change of text in a copy of one package's source. The copy stands before the package
on the import path of a process that runs the storm; the working tree stays as it is.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
SHELL = "libs/shell/src"
TASK = "forgemq_shell/task.py"
RESTORE = "forgemq_shell/restore.py"
SNAPSHOTS = "forgemq_shell/snapshots.py"
BATCH = "forgemq_shell/batch.py"
POSITIONS = "forgemq_shell/restored_positions.py"
AUDITOR = "services/auditor/src"
GATEWAY = "services/gateway/src"
SCHEDULER = "services/scheduler/src"
REWARD = "services/reward/src"
PENDING = "forgemq_reward/core/pending.py"
TRIM = "forgemq_auditor/core/trim.py"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One defect.

    Attributes:
        name: What is wrong.
        file: Below the package's source.
        edits: Texts that occur exactly once, and what takes their place.
        case: Of the storm that must find it.
        source: Source folder of the package.
    """

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    case: str = "counting"
    source: str = SHELL


def run_mutant(mutant: Mutant, folder: Path, *, seeds: int) -> subprocess.CompletedProcess[str]:
    """Run the storm on the mutated package up to the first defect; exit status 1: it found one."""
    copy = folder / "src"
    shutil.copytree(REPOSITORY / mutant.source, copy)
    file = copy / mutant.file
    text = file.read_text(encoding="utf-8")
    for old, new in mutant.edits:
        if text.count(old) != 1:
            raise ValueError(f"{mutant.name}: {old!r} is {text.count(old)} times in {mutant.file}")
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")
    arguments = ["--seeds", str(seeds), "--case", mutant.case, "--stop"]
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation.storm", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{REPOSITORY}"},
        capture_output=True,
        text=True,
        check=False,
    )


MUTANTS = (
    Mutant(
        name="restores before it fences the previous owner",
        file=TASK,
        edits=(
            (
                "        writer = await self._log.transaction_writer(",
                "        await self._restore()\n"
                "        writer = await self._log.transaction_writer(",
            ),
            (
                "        if not await ends_before(self._stop, self._restore()):\n"
                "            return\n",
                "",
            ),
        ),
    ),
    Mutant(
        name="the journal forgets every second neighbour of a batch",
        file=BATCH,
        edits=(("count = record.offset + 1 - previous.offset", "count = previous.count"),),
    ),
    Mutant(
        name="says that one record is not needed that is",
        file=SNAPSHOTS,
        edits=(
            (
                "self._read = self._read, _kept(batch, self._written_at)",
                "self._read = self._read, KeptSnapshot(\n"
                "            position=self._written_at,\n"
                "            positions={Place(at.topic, at.partition): at.position + 9\n"
                "                       for at in batch.positions})",
            ),
        ),
        case="merger",
    ),
    Mutant(
        name="run time starts at 0 again",
        file=TASK,
        edits=(("self._run_ms = restored.run_ms", "self._run_ms = 0"),),
    ),
    Mutant(
        name="accepts positions that are ahead of the journal",
        file=POSITIONS,
        edits=(
            (
                "committed.get(place, journalled) != journalled",
                "committed.get(place, 0) < journalled",
            ),
        ),
    ),
    Mutant(
        name="reads a partition again whose position expired",
        file=POSITIONS,
        edits=(
            (
                "positions[place] = journalled or first",
                "positions[place] = committed.get(place) or first",
            ),
        ),
    ),
    Mutant(
        name="a snapshot holds the position of one input alone",
        file=TASK,
        edits=(
            (
                "            positions=self._positions,\n",
                "            positions=dict(list(self._positions.items())[:1]),\n",
            ),
        ),
    ),
    Mutant(
        name="believes what it read although it was fenced",
        file=TASK,
        edits=(("            await self._check_owner(writer)\n", ""),),
        case="merger",
    ),
    Mutant(
        name="a snapshot does not say the run time",
        file=TASK,
        edits=(("            run_ms=self._run_ms,\n", "            run_ms=0,\n"),),
    ),
    Mutant(
        name="the journal begins one record behind the newest snapshot",
        file=SNAPSHOTS,
        edits=(
            ("self.journal_start = previous.position", "self.journal_start = self._written_at + 1"),
        ),
        case="merger",
    ),
    Mutant(
        name="numbers its batches by those that are kept",
        file=RESTORE,
        edits=(("entries[-1].sequence + 1 if entries else 0", "len(entries)"),),
    ),
    Mutant(
        name="stamps outputs with the number of the next batch",
        file=TASK,
        edits=(("sequence=self._sequence),\n", "sequence=self._sequence + 1),\n"),),
    ),
    Mutant(
        name="commits positions behind the outputs, in a transaction of their own",
        file=TASK,
        edits=(
            (
                "        await patiently(\n            lambda: writer",
                "        await writer.commit(outputs=outputs, group=plan.positions_group, "
                "positions={})\n"
                "        outputs = []\n"
                "        await patiently(\n            lambda: writer",
            ),
        ),
    ),
    Mutant(
        name="goes on with a batch that it has committed",
        file=TASK,
        edits=(("                batch = self._new_batch()\n", ""),),
    ),
    Mutant(
        name="forgets ticks that it has not journalled yet",
        file=TASK,
        edits=(
            (
                "            await self._measure_lag(reader)\n",
                "            else:\n                batch = self._new_batch()\n"
                "            await self._measure_lag(reader)\n",
            ),
        ),
        case="merger",
    ),
    Mutant(
        name="does not journal a record that does not decode",
        file=BATCH,
        edits=(
            ("        self._note(record)\n        if record.lost:\n", "        if record.lost:\n"),
            (
                "        try:\n            outputs = self._core.handle(message)\n",
                "        self._note(record)\n        try:\n"
                "            outputs = self._core.handle(message)\n",
            ),
        ),
    ),
    Mutant(
        name="writes no dead letter for a record that the core refuses",
        file=BATCH,
        edits=(
            ('refused: {error}", has_dead_letter=True', 'refused: {error}", has_dead_letter=False'),
        ),
    ),
    Mutant(
        name="trims what one of several readers still needs",
        source=AUDITOR,
        file=TRIM,
        edits=(("before[partition] = min(limits)", "before[partition] = max(limits)"),),
        case="merger",
    ),
    Mutant(
        name="trims although a reader has not said what it needs",
        source=AUDITOR,
        file=TRIM,
        edits=(
            (
                "needed[group].get(partition, first[partition]) for group in topic.needed_by]",
                "needed[group][partition] for group in topic.needed_by\n"
                "            if partition in needed[group]] or [0]",
            ),
        ),
        case="merger",
    ),
    Mutant(
        name="a merger restores without the completions of open groups",
        source="services/merger/src",
        file="forgemq_merger/core/merger.py",
        edits=(("self._groups[record.group_id].recall(record, offset=message.offset)", "return"),),
        case="merger",
    ),
    Mutant(
        name="a reward core restores without the groups it has scored",
        source="services/reward/src",
        file="forgemq_reward/core/groups.py",
        edits=(("        self._scored = set(state.scored)\n", ""),),
        case="reward",
    ),
    Mutant(
        name="the grading ends when a zombie fences it",
        source="services/reward/src",
        file="forgemq_reward/grading_positions.py",
        edits=(("except FencedError as error:", "except ZeroDivisionError as error:"),),
        case="grading",
    ),
    Mutant(
        name="a gateway ignores that a group is closed",
        source=GATEWAY,
        file="forgemq_gateway/core/registry.py",
        edits=(
            (
                '            group.closed = record.detail or "past its deadline"\n',
                "            pass\n",
            ),
        ),
        case="claims",
    ),
    Mutant(
        name="a closed group ends what is finished once more",
        source=GATEWAY,
        file="forgemq_gateway/core/group.py",
        edits=(
            (
                "return not is_finishing and index not in self.finished and index not in",
                "return not is_finishing and index not in",
            ),
        ),
        case="claims",
    ),
    Mutant(
        name="a group's time to play counts from its admission",
        source=SCHEDULER,
        file="forgemq_scheduler/core/scheduler.py",
        edits=(
            (
                'phase="playing", deadline_ms=deadline_ms)',
                'phase="playing", deadline_ms=group.deadline_ms)',
            ),
        ),
        case="claims",
    ),
    Mutant(
        name="closes a group at every tick past its deadline",
        source=SCHEDULER,
        file="forgemq_scheduler/core/scheduler.py",
        edits=(
            (
                '            self._keep(group, phase="closed", deadline_ms=deadline_ms)\n',
                "            del deadline_ms\n",
            ),
        ),
        case="claims",
    ),
    Mutant(
        name="an agent that crashes on a full context is masked",
        source=GATEWAY,
        file="forgemq_gateway/operations.py",
        edits=(
            (
                'msgspec.structs.replace(ending, status="completed", truncated_by=cause)',
                "msgspec.structs.replace(ending, truncated_by=cause)",
            ),
        ),
        case="claims",
    ),
    Mutant(
        name="answers a request for a group that is not on the log yet",
        source=GATEWAY,
        file="forgemq_gateway/operations.py",
        edits=(
            (
                "                await self._outbox.promise(record, tenure=tenure)\n"
                "            finally:\n                del self._requesting",
                "                asyncio.ensure_future(\n"
                "                    self._outbox.promise(record, tenure=tenure)\n"
                "                )\n"
                "            finally:\n                del self._requesting",
            ),
        ),
        case="gateway_unanswered",
    ),
    Mutant(
        name="a new owner reads what there is while the previous one may still write",
        source=GATEWAY,
        file="forgemq_gateway/members.py",
        edits=(("                await self._fenced.fence(gateway)\n", "                pass\n"),),
        case="claims",
    ),
    Mutant(
        name="a restart of the grading begins behind episodes that wait",
        source=REWARD,
        file=PENDING,
        edits=(("(pending.offset for pending in self._episodes.values())", "()"),),
        case="grader_killed",
    ),
)
