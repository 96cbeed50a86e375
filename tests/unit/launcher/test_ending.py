"""When a run that no launcher keeps up is over, and how its pods are given back."""

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from forgemq_contracts.groups import AdmittedGroup, RetiredGroup
from forgemq_contracts.messages import Output
from forgemq_contracts.requested_end import RequestedEnd
from forgemq_contracts.rounds import end_round_groups
from forgemq_contracts.run import Evaluation, StartedRun
from forgemq_contracts.topics import ADMITTED_GROUPS, RETIRED_GROUPS
from forgemq_launcher.commands.ending import new_end, played_or_asked, wait_until_played
from forgemq_launcher.core.workloads import workload_of
from forgemq_launcher.records.run_end import request_end
from forgemq_launcher.upkeep.cluster import Cluster, ClusterError, own_cluster
from forgemq_settings.environment import SettingsError
from tests.unit.launcher.test_follower import log_of
from tests.unit.run_view.synthetic import DOMAIN, SyntheticRun, started


def started_with_tasks(tasks: int) -> StartedRun:
    """Each of its two ways to sample plays so many tasks in the last round."""
    begun = started()
    made = msgspec.structs.replace(begun.configuration, evaluation=Evaluation(tasks=tasks))
    return msgspec.structs.replace(begun, configuration=made)


def test_a_run_does_not_end_before_the_start_that_a_faster_clock_wrote() -> None:
    begun = started()
    assert new_end(begun, None, at_ms=begun.started_ms - 300_000).ended_ms == begun.started_ms
    assert new_end(begun, None, at_ms=begun.started_ms + 7).ended_ms == begun.started_ms + 7


def played(name: str, *, is_over: bool = True) -> list[Output]:
    """A held-out group of this round: admitted, and retired if it is over."""
    admitted = AdmittedGroup(
        group_id=f"e-{name}",
        domain=DOMAIN,
        purpose="eval",
        group_size=1,
        task=b"{}",
        version_at_admission=3,
        round_name=name,
    )
    retired = RetiredGroup(group_id=f"e-{name}", domain=DOMAIN, purpose="eval", reason="evaluated")
    found = [Output(topic=ADMITTED_GROUPS.name, partition=0, record=admitted)]
    return found + [Output(topic=RETIRED_GROUPS.name, partition=0, record=retired)] * is_over


async def is_over(begun: StartedRun, *others: Output, steps: int = 3, still_s: float = 9.0) -> bool:
    log = await log_of(SyntheticRun().play(steps=steps), *others)
    try:
        async with asyncio.timeout(0.6):
            await wait_until_played(log, begun, look_every_s=0.02, still_s_max=still_s)
    except TimeoutError:
        return False
    return True


@pytest.mark.slow
async def test_a_run_is_over_once_its_last_step_is_trained_and_its_last_round_is_played() -> None:
    begun = started_with_tasks(1)
    assert end_round_groups(begun.configuration) == 2
    both = [*played("end-sampled"), *played("end-greedy")]
    assert await is_over(begun, *both)
    assert not await is_over(begun, *both, steps=2), "a step is left to train"
    assert not await is_over(begun, *played("end-sampled")), "half of the round is not asked for"
    assert not await is_over(begun, *played("start-sampled"), *played("start-greedy"))


@pytest.mark.slow
async def test_an_open_group_keeps_a_run_up_until_nothing_has_happened_for_long() -> None:
    open_one = [*played("end-sampled"), *played("end-greedy", is_over=False)]
    assert not await is_over(started_with_tasks(1), *open_one)
    assert await is_over(started_with_tasks(1), *open_one, still_s=0.1)


async def test_a_run_that_is_asked_to_end_is_not_waited_for_and_one_that_is_played_not_asked() -> (
    None
):
    begun = started_with_tasks(0)
    requested = RequestedEnd(run="r", started_ms=begun.started_ms, requested_ms=7, detail="why")
    log = await log_of(SyntheticRun().play(steps=2))
    waiting = asyncio.ensure_future(played_or_asked(log, begun))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await request_end(log, requested)
    async with asyncio.timeout(5):
        assert await waiting == requested
        log = await log_of(SyntheticRun().play(steps=3))
        assert await played_or_asked(log, begun, look_every_s=0.02) is None


class Patched(http.server.BaseHTTPRequestHandler):
    """Takes patches of the one token, as the API server does; an unknown object is not found."""

    asked: list[tuple[str, str, object]]
    token: str

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, self.headers["content-type"], body))
        is_known = "unknown" not in self.path
        is_user = self.headers["authorization"] == f"Bearer {self.token}"
        answer = b"{}" if is_known else b'{"reason":"NotFound"}'
        self.send_response((200 if is_known else 404) if is_user else 401)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *arguments: object) -> None:
        del format, arguments


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    Patched.asked, Patched.token = [], "t"
    (tmp_path / "token").write_text("t\n")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Patched)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    yield Cluster(url=url, namespace="runs", token_file=str(tmp_path / "token"))
    server.shutdown()
    server.server_close()


def test_released_workloads_have_no_pods_and_what_keda_scales_is_paused(cluster: Cluster) -> None:
    cluster.release(workload_of("statefulsets/trainer"))
    cluster.release(workload_of("scaledobjects/reward"))
    cluster.resume(workload_of("scaledobjects/reward"))
    cluster.resume(workload_of("statefulsets/trainer"))
    kind, paused = "application/merge-patch+json", "autoscaling.keda.sh/paused-replicas"
    reward = "/apis/keda.sh/v1alpha1/namespaces/runs/scaledobjects/reward"
    assert Patched.asked == [
        (
            "/apis/apps/v1/namespaces/runs/statefulsets/trainer/scale",
            kind,
            {"spec": {"replicas": 0}},
        ),
        (reward, kind, {"metadata": {"annotations": {paused: "0"}}}),
        (reward, kind, {"metadata": {"annotations": {paused: None}}}),
    ]


def test_a_change_that_the_cluster_refuses_is_named(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match=r"deployments/unknown/scale: 404 .*NotFound"):
        cluster.release(workload_of("deployments/unknown"))
    with pytest.raises(ValueError, match="got 'pods/x'"):
        workload_of("pods/x")


def test_a_run_longer_than_its_pods_token_is_valid_ends_with_the_token_of_that_moment(
    cluster: Cluster, tmp_path: Path
) -> None:
    """A kubelet writes a new token before the one that the pod began with expires."""
    Patched.token = "renewed"
    with pytest.raises(ClusterError, match=r"/scale: 401"):
        cluster.release(workload_of("statefulsets/trainer"))
    (tmp_path / "token").write_text("renewed")
    cluster.release(workload_of("statefulsets/trainer"))
    assert len(Patched.asked) == 2


def test_a_pod_finds_its_cluster_and_any_other_process_is_refused(tmp_path: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(SettingsError, match="--release"):
        own_cluster(environ, account=tmp_path)
    for name in ("token", "namespace"):
        (tmp_path / name).write_text(f"{name}\n")
    assert own_cluster(environ, account=tmp_path) == Cluster(
        url="https://[fd00::1]:443",
        namespace="namespace",
        token_file=str(tmp_path / "token"),
        ca_file=str(tmp_path / "ca.crt"),
    )
    with pytest.raises(SettingsError, match="--release"):
        own_cluster({}, account=tmp_path)
