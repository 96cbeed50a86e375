"""Whole runs of what a step's loss may be made of: several updates, and a teacher's word."""

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.launched_run import DEMO, LaunchedRun
from tests.integration.run_log import Accounts, accounts

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1500)]

SMALL = (
    "queues.0.group_size=4",
    "queues.0.groups_per_step=8",
    "queues.0.slots=16",
    "queues.0.window=4",
    "optimizer.warmup_steps=2",
)
NOISE = 0.2
"""Of each matrix' standard deviation: the mean NLL of right turns rises from 0.04 to 0.7 nats."""


def ended(run: LaunchedRun, run_id: str, kafka: str, *, within_s: float) -> Accounts:
    """The records of the run once it has ended well, with its guarantees held."""
    assert run.wait_for_end(within_s=within_s) == 0, run.story()
    report = run.report(run_id)
    assert set(report["guarantees"]) == {"G1", "G2", "G3", "G4", "G5"}
    assert all(report["guarantees"].values()), report["guarantees_checked"]
    return accounts(kafka, run=run_id, blobs=str(run.blobs(run_id)))


def noisy_model(base: Path, folder: Path) -> Path:
    """The base model with noise on its matrices: it has forgotten most of the desk."""
    folder.mkdir()
    for file in base.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(0)
    weights = load_file(base / "model.safetensors")
    noisy = {
        name: each + NOISE * each.std() * torch.randn_like(each) if each.dim() > 1 else each
        for name, each in weights.items()
    }
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_steps_of_eight_updates_train_each_group_twice_and_survive_a_killed_trainer(
    kafka_bootstrap, base_engine_url, new_run_id, tmp_path
):
    run_id = new_run_id()
    environ = {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": base_engine_url}
    run = LaunchedRun(tmp_path, environ)
    try:
        run.start(
            DEMO,
            f"run={run_id}",
            "trainer.steps=8",
            "evaluation.tasks=64",
            "evaluation.greedy=false",
            "optimizer.lr=3e-4",
            "updates.minibatches=4",
            "updates.passes=2",
            *SMALL,
        )
        run.wait_for_line(r"step 3 trained", within_s=700)
        os.kill(run.pid_of("trainer", within_s=30), signal.SIGKILL)
        log = ended(run, run_id, kafka_bootstrap, within_s=900)
        evaluations = run.report(run_id)["evaluations"]
    finally:
        run.close()
    steps = log.surviving_steps()
    assert list(steps) == list(range(8))
    assert max(step.lineage for step in steps.values()) > 1, "the trainer began again"
    scheduled = {each.step: each for each in log.scheduled}
    for number, step in steps.items():
        metrics, groups = step.metrics, scheduled[number].groups
        assert (metrics.updates, metrics.updates_skipped) == (8, 0)
        assert metrics.loss_tokens == sum(group.loss_tokens for group in groups)
        assert metrics.tree_tokens == sum(group.tree_tokens for group in groups)
    # Later updates of a step have moved the policy from what sampled it.
    assert all(step.metrics.kl_k3 > 1e-5 for step in steps.values())
    success = {each["round_name"]: each["tally"]["success"] for each in evaluations}
    assert success["end-sampled"] > success["start-sampled"] + 0.05, success


def test_a_policy_comes_near_a_teacher_whose_word_is_its_only_reward(
    kafka_bootstrap, base_engine_url, engine_model, new_run_id, tmp_path
):
    """The base model teaches a noisy copy of itself; the run starts the copy's own engine."""
    run_id, student = new_run_id(), noisy_model(engine_model, tmp_path / "student")
    run = LaunchedRun(tmp_path, {"FORGEMQ_KAFKA": kafka_bootstrap})
    try:
        run.start(
            DEMO,
            f"run={run_id}",
            f"model.path={student}",
            "trainer.steps=12",
            "evaluation.tasks=0",
            f"distillation.url={base_engine_url}",
            "distillation.reward_weight=0",
            *SMALL,
        )
        log = ended(run, run_id, kafka_bootstrap, within_s=1300)
    finally:
        run.close()
    divergence = [step.metrics.kl_teacher for step in log.surviving_steps().values()]
    assert len(divergence) == 12
    assert divergence[0] > 0.1, divergence
    assert sum(divergence[-3:]) / 3 < 0.6 * divergence[0], divergence
    assert {group.reason for group in log.retired} <= {"trained", "cancelled"}
