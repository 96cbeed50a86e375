"""The whole demo on its own broker and engine, interrupted and resumed."""

import re
import urllib.request
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.integration.launched_run import DEMO, LaunchedRun
from tests.integration.otlp_receiver import OtlpReceiver, otlp_receiver

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 6
GROUPS_PER_STEP = 8
GROUP_SIZE = 8
TASKS = 16
NUMBERS = {
    "steps",
    "samples",
    "tokens_generated",
    "tokens_trained",
    "merge_ratio_per_request",
    "merge_ratio_append",
    "staleness_max",
    "staleness_bound",
    "groups_admitted",
    "groups_open",
    "logprob_gap_max",
    "duration_s",
}
SHARES = {"success_start", "success_end", "success_start_greedy", "success_end_greedy"}


@pytest.fixture
def received() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as receiver:
        yield receiver


def page_of(run: LaunchedRun) -> str:
    """The console page, at the address that the terminal names."""
    url = run.wait_for_line(r"page: (http://\S+)", within_s=120)[1]
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def last_stamp_s(output: str) -> float:
    """Seconds from a launcher's start to its last line."""
    return float(re.findall(r"^ *([\d.]+) s  ", output, flags=re.MULTILINE)[-1])


def assert_sane(report) -> None:
    """Check that every field of the report is there with a possible value."""
    assert {name for name in NUMBERS | SHARES if not isinstance(report[name], int | float)} == set()
    assert all(0 <= report[name] <= 1 for name in SHARES)
    assert (report["steps"], report["groups_open"]) == (STEPS, 0)
    retired = report["groups_retired"]
    assert sum(retired.values()) == report["groups_admitted"]
    assert retired["trained"] == STEPS * GROUPS_PER_STEP
    assert retired["evaluated"] == 4 * TASKS
    assert report["staleness_max"] <= report["staleness_bound"] == 2
    assert report["merge_ratio_per_request"] > report["merge_ratio_append"] > 1
    assert 0 < report["logprob_gap_max"] < 1e-2
    # An episode has two turns or more, and evaluations never train.
    assert report["samples"] >= 2 * retired["trained"] * GROUP_SIZE * 0.9
    assert report["tokens_generated"] > report["tokens_trained"] > report["samples"]
    assert report["guarantees"] == dict.fromkeys(("G1", "G2", "G3", "G4", "G5"), True)
    assert {point["groups"] for point in report["evaluations"]} == {TASKS}
    assert len(report["evaluations"]) == 4


def share_with_less_cached(receiver: OtlpReceiver) -> float:
    """Share of completions whose engine had cached less than the gateway expected."""
    counted = receiver.counted("forgemq.gateway.cache_outcomes")
    outcomes: Counter[str] = Counter()
    for attributes, value in counted.items():
        outcomes[str(dict(attributes)["outcome"])] += int(value)
    assert outcomes.total() > STEPS * GROUPS_PER_STEP * GROUP_SIZE
    return outcomes["fewer"] / outcomes.total()


def test_the_demo_is_broken_off_resumed_and_reported_with_every_guarantee(tmp_path, received):
    environ = {
        "FORGEMQ_TELEMETRY_EXPORTER": "otlp",
        "FORGEMQ_TELEMETRY_ENDPOINT": received.url,
    }
    run = LaunchedRun(tmp_path, environ)
    try:
        run.start(DEMO, "run=small", f"trainer.steps={STEPS}", f"evaluation.tasks={TASKS}")
        run.wait_for_line("step 1 trained", within_s=600)
        assert "ForgeMQ" in page_of(run)
        run.interrupt()
        assert run.wait_for_end(within_s=60) == 130
        assert run.left_behind() == []
        first = run.output()

        run.start(DEMO, "--resume", "small")
        status = run.wait_for_end(within_s=800)
        assert run.left_behind() == []
        second = run.output()
    finally:
        run.close()

    assert status == 0, run.story()
    assert "restarting" not in first + second
    report = run.report("small")
    assert_sane(report)
    up_s = last_stamp_s(first) + last_stamp_s(second)
    assert 0.5 * up_s < report["duration_s"] < up_s
    assert (run.runs / "small" / "report.png").read_bytes().startswith(b"\x89PNG")
    # More is cached than expected: episodes of this small domain say the same, word for word.
    assert share_with_less_cached(received) <= 0.02
