"""Devices and hosts that are refused before a step, and sizes of the groups offered to lanes."""

import pytest

from forgemq_contracts.weights import ReportedEngine
from forgemq_settings.environment import SettingsError
from forgemq_trainer.core.lanes import LiveLanes
from forgemq_trainer.fast_path import FastPaths
from forgemq_trainer.ranks.ranks import check_device
from forgemq_trainer.settings import TrainerSettings
from forgemq_trainer.transfer_deadline import TransferDeadline
from forgemq_trainer.weight_paths import broadcasts_of


@pytest.mark.parametrize(("device", "gpus"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_a_missing_gpu_is_refused_by_name(device: str, gpus: int) -> None:
    with pytest.raises(SettingsError, match=f"device is {device}, but torch sees {gpus} GPUs"):
        check_device(device, gpus=gpus)


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("cuda", 1), ("cuda:1", 2)])
def test_an_existing_device_is_accepted(device: str, gpus: int) -> None:
    check_device(device, gpus=gpus)


def test_nccl_without_a_gpu_is_refused_and_gloo_sends_from_anywhere() -> None:
    nccl = TrainerSettings(folder="f", fast_path="nccl")
    with pytest.raises(SettingsError, match="FORGEMQ_TRAINER_FAST_PATH=nccl sends from a GPU"):
        broadcasts_of(nccl, device="cpu")
    gloo = TrainerSettings(folder="f")
    for device in ("cpu", "cuda:1"):
        assert broadcasts_of(gloo, device=device) is not None
    nccl = TrainerSettings(folder="f", fast_path="nccl-shared")
    with pytest.raises(SettingsError, match=r"=nccl-shared .* or gloo-shared, which reaches every"):
        broadcasts_of(nccl, device="cpu")
    assert broadcasts_of(TrainerSettings(folder="f", fast_path="off"), device="cpu") is None


def _report(lane: int, *, ranks: int) -> ReportedEngine:
    return ReportedEngine(
        lane=lane,
        epoch=1,
        url="http://127.0.0.1:1",
        is_serving=True,
        lineage=1,
        version=0,
        running=0,
        queued=0,
        reported_ms=0,
        ranks=ranks,
    )


def test_a_lanes_group_has_a_rank_for_each_process_of_its_engine() -> None:
    lanes = LiveLanes()
    lanes.observe(_report(0, ranks=4), at_s=0)
    lanes.observe(_report(1, ranks=1), at_s=0)
    paths = FastPaths(host="127.0.0.1", backend="gloo", deadline=TransferDeadline(1, 2e8))
    offers = paths.offer(lanes.live(at_s=0), prefix="r-1", ranks=lanes.ranks())
    assert [offer.world_size for offer in offers] == [5, 2]
    # The lane's engine restarted with fewer GPUs under the same epoch.
    lanes.observe(_report(0, ranks=2), at_s=0)
    again = paths.offer(lanes.live(at_s=0), prefix="r-1", ranks=lanes.ranks())
    assert [offer.world_size for offer in again] == [3, 2]
    assert again[0].group_name != offers[0].group_name
    assert again[1].group_name == offers[1].group_name
    paths.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_host_that_no_engine_can_connect_to_is_refused_unless_nothing_is_sent_from_it(
    host: str,
) -> None:
    sent = TrainerSettings(folder="f", host=host, fast_path="gloo-shared")
    with pytest.raises(SettingsError, match=f"FORGEMQ_TRAINER_HOST: {host} stands for every"):
        broadcasts_of(sent, device="cpu")
    relayed = TrainerSettings(folder="f", host=host, fast_path="relay")
    assert broadcasts_of(relayed, device="cpu") is None
