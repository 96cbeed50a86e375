"""One run with every exporter on: a completion's trace from the agent's call to its step."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_contracts import topics
from forgemq_contracts.completions import FinishedCompletion
from forgemq_telemetry.traces import completion_trace, span_ids
from tests.integration.launched_run import DIALOGUE, LaunchedRun
from tests.integration.otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from tests.integration.run_log import GROUP_PARTITIONS, Accounts, accounts, records_of
from tests.integration.stand_in import stand_in_engine

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

STEPS = 3
SENDERS = {"agents", "gateway", "inference", "reward", "merger", "scheduler", "trainer"}


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run that has ended: the telemetry of its services, and the records on its log."""

    run_id: str
    kafka: str
    receiver: OtlpReceiver
    accounts: Accounts

    @property
    def trained(self) -> frozenset[str]:
        """Ids of every completion that some step trained."""
        groups = {group for step in self.accounts.trained for group in step.group_ids}
        trees = [tree for tree in self.accounts.trees if tree.group_id in groups]
        return frozenset(sample for tree in trees for sample in tree.sample_ids)

    def by_trace(self) -> Mapping[str, Sequence[ReceivedSpan]]:
        """Spans of each trace, in the order in which they began."""
        spans: dict[str, list[ReceivedSpan]] = defaultdict(list)
        for span in sorted(self.receiver.spans, key=lambda each: each.began_ns):
            spans[span.id.trace].append(span)
        return spans

    def linking(self, completion: str) -> Sequence[ReceivedSpan]:
        """Spans of other traces that say they used this completion."""
        return [span for span in self.receiver.spans if completion in span.linked_traces]

    def parent(self, span: ReceivedSpan) -> ReceivedSpan:
        """The only span that this one names as its parent."""
        (found,) = [
            each for each in self.receiver.spans if each.id == span.id._replace(span=span.parent)
        ]
        return found


@pytest.fixture(scope="module")
def measured(
    kafka_bootstrap, new_run_id, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MeasuredRun]:
    run_id, folder = new_run_id(), tmp_path_factory.mktemp("trace")
    with otlp_receiver() as receiver, stand_in_engine(latency_s=0.05, tokens=8) as engine:
        environ = {
            "FORGEMQ_KAFKA": kafka_bootstrap,
            "FORGEMQ_ENGINE_URL": engine,
            "FORGEMQ_TELEMETRY_EXPORTER": "otlp",
            "FORGEMQ_TELEMETRY_ENDPOINT": receiver.url,
        }
        run = play(folder, run_id, environ)
        yield MeasuredRun(
            run_id=run_id,
            kafka=kafka_bootstrap,
            receiver=receiver,
            accounts=accounts(kafka_bootstrap, run=run_id, blobs=str(run.blobs(run_id))),
        )


def play(folder: Path, run_id: str, environ: Mapping[str, str]) -> LaunchedRun:
    run = LaunchedRun(folder, environ)
    try:
        chosen = (f"trainer.steps={STEPS}", "evaluation.tasks=0", "log.keep_for_replay=true")
        run.start(DIALOGUE, f"run={run_id}", *chosen)
        run.wait_for_end(within_s=180)
        report = run.report(run_id)
    finally:
        run.close()
    held = {name for name, holds in report["guarantees"].items() if holds}
    assert held >= {"G1", "G2", "G3", "G4"}, run.story()  # not G5: a stand-in's are noise
    assert report["steps"] == STEPS
    return run


def test_every_service_sends_its_spans_and_metrics_under_its_name_and_run(
    measured: MeasuredRun,
) -> None:
    assert {span.service for span in measured.receiver.spans} == SENDERS
    assert {span.run for span in measured.receiver.spans} == {measured.run_id}
    assert {service for service, _ in measured.receiver.metrics} >= SENDERS - {"agents"}
    assert ("trainer", "forgemq.trainer.step_s") in measured.receiver.metrics


def test_a_process_sends_all_under_the_name_and_lane_that_a_scrape_of_it_has(
    measured: MeasuredRun,
) -> None:
    senders = {(span.service, span.instance, span.lane) for span in measured.receiver.spans}
    assert senders == {
        *((service, service, "") for service in SENDERS - {"inference"}),
        ("inference", "inference-0", "0"),
    }


def test_one_trace_holds_a_completion_from_the_gateway_through_the_topics(
    measured: MeasuredRun,
) -> None:
    traces = measured.by_trace()
    assert len(measured.trained) >= STEPS * 2 * 4 * 3 // 2
    for completion in measured.trained:
        request, generate, *later = traces[completion]
        assert (request.service, request.name) == ("gateway", "request_completion")
        assert request.parent == completion[:16]
        assert (generate.service, generate.name) == ("inference", "inference.generate")
        assert generate.attributes["request_id"] == completion
        assert generate.parent == request.id.span
        # Several, if the merger's transaction was aborted. If the merger had the group's scores
        # before this completion, its tree and all that follows are of this trace too.
        merges = [span for span in later if span.parent == generate.id.span]
        assert merges
        for merge in merges:
            assert (merge.service, merge.name) == ("merger", "transform")
            assert merge.attributes["topic"] == topics.FINISHED_COMPLETIONS.name


def test_the_agents_call_and_the_completion_it_got_name_each_other(measured: MeasuredRun) -> None:
    traces = measured.by_trace()
    for completion in measured.trained:
        request = traces[completion][0]
        (call,) = [span for span in measured.receiver.spans if span.id in request.links]
        assert (call.service, call.name) == ("agents", "chat")
        assert call.attributes["completion"] == completion
        assert call.attributes["episode"] == request.attributes["episode"]
        assert call.began_ns <= request.began_ns <= call.ended_ns


def test_what_brings_completions_together_links_each_of_them_up_to_the_step(
    measured: MeasuredRun,
) -> None:
    steps = {s.attributes["step"]: s for s in measured.receiver.spans if s.name == "step"}
    assert sorted(steps) == list(range(STEPS))
    for completion in measured.trained:
        used = {
            (span.service, span.name, span.attributes.get("topic", "")): span
            for span in measured.linking(completion)
        }
        grade = used.pop(("reward", "grade", ""))
        score = used.pop(("reward", "transform", topics.FINISHED_EPISODES.name))
        merge = used.pop(("merger", "transform", topics.SCORED_GROUPS.name))
        step = used.pop(("trainer", "step", ""))
        assert not used
        assert max(grade.began_ns, score.began_ns) <= merge.ended_ns
        assert merge.began_ns <= step.began_ns

        scored = measured.parent(merge)
        assert (scored.service, scored.name) == ("reward", "transform")
        scheduled = measured.parent(step)
        assert (scheduled.service, scheduled.name) == ("scheduler", "transform")
    linked = [trace for step in steps.values() for trace in step.linked_traces]
    assert sorted(linked) == sorted(measured.trained)


def test_the_context_travels_in_the_headers_of_the_records(measured: MeasuredRun) -> None:
    async def read() -> None:
        log = KafkaLog(KafkaConnection(bootstrap=measured.kafka), run=measured.run_id)
        try:
            topic = topics.FINISHED_COMPLETIONS
            for record in await records_of(log, topic.name, partitions=GROUP_PARTITIONS):
                finished = topics.decode(topic, record.value)
                assert isinstance(finished, FinishedCompletion)
                there = span_ids(record.headers)
                named = span_ids(completion_trace(finished.request_id))
                assert there is not None
                assert named is not None
                assert there.trace_id == named.trace_id
                assert there.span_id in generated
        finally:
            await log.close()

    spans = [span for span in measured.receiver.spans if span.name == "inference.generate"]
    generated = {int(span.id.span, 16) for span in spans}
    asyncio.run(read())
