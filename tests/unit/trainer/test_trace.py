"""One trace from an agent's HTTP request to the optimizer step that trained on its answer."""

import io
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from msgspec import structs
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from forgemq_bus.log import Place
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.completions import FinishedCompletion, WeightSpan
from forgemq_contracts.groups import EpisodeScore, ScoredCompletion, ScoredGroup
from forgemq_contracts.messages import Message
from forgemq_contracts.trees import MergedTree
from forgemq_merger.core.merger import MergerCore
from forgemq_telemetry import Telemetry
from forgemq_telemetry.exporters import OpenTelemetryExporter
from forgemq_telemetry.settings import TelemetrySettings
from forgemq_telemetry.traces import span_ids
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.world import configuration_of, running
from tests.unit.rendering.folders import write_model_folder
from tests.unit.trainer.bench import memory_bench
from tests.unit.trainer.scene import save_base, scheduled_step

AGENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
REQUESTS = 160
"""More than OpenTelemetry's default of 128 links for each span."""


def _exporting(service: str) -> tuple[Telemetry, InMemorySpanExporter]:
    spans = InMemorySpanExporter()
    exporter = OpenTelemetryExporter(
        resource={"service.name": service},
        readers=[],
        processors=[SimpleSpanProcessor(spans)],
        settings=TelemetrySettings(),
    )
    return Telemetry(service=service, exporter=exporter, stream=io.StringIO()), spans


async def _asked(
    folder: Path, telemetry: Telemetry
) -> tuple[dict[str, bytes], list[FinishedCompletion]]:
    """Send an agent's requests through a gateway: headers by request id, and the completions."""
    model = write_model_folder(folder / "served")
    log = MemoryLog(run="r", clock_ms=wall_ms)
    configuration = configuration_of(model)
    async with running(log.open, configuration, lambda _: "yes", telemetry=telemetry) as (world, _):
        claim = await world.episode()
        async with httpx.AsyncClient(timeout=20) as client:
            for number in range(REQUESTS):
                answer = await client.post(
                    f"{claim['base_url']}/chat/completions",
                    json={"model": "m", "messages": [{"role": "user", "content": f"n {number}"}]},
                    headers={"Authorization": f"Bearer {claim['key']}", "traceparent": AGENT},
                )
                assert answer.status_code == 200, answer.text
        finished = await world.records(topics.FINISHED_COMPLETIONS)
        reader = await world.log.reader({Place(topics.REQUESTED_COMPLETIONS.name, 0): 0})
        headers = {}
        for record in await reader.read(timeout_s=1, records_max=10 * REQUESTS):
            asked = topics.decode(topics.REQUESTED_COMPLETIONS, record.value)
            headers[getattr(asked, "request_id")] = dict(record.headers)["traceparent"]  # noqa: B009
    return headers, finished


def _merged(finished: list[FinishedCompletion]) -> MergedTree:
    """The group's tree, merged from the lane's completions."""
    group = finished[0].group_id
    merger = MergerCore(0)
    scores = []
    outputs = []
    for offset, completion in enumerate(finished):
        span = WeightSpan(start=0, end=len(completion.output) // 4, lineage=1, version=0)
        record = structs.replace(completion, spans=(span,))
        outputs += merger.handle(
            Message(topic="t", partition=0, offset=offset, timestamp_ms=0, record=record)
        )
        scores.append(
            ScoredCompletion(
                completion_id=completion.request_id,
                offset=offset,
                episode_index=0,
                sequence=offset,
                return_to_go=1.0,
                advantage=1.0 - 2.0 * (offset % 2),
            )
        )
    episode = EpisodeScore(
        episode_id=finished[0].episode_id, outcome=1, speed=0, process=0, total=1
    )
    scored = ScoredGroup(
        group_id=group,
        domain="shop",
        purpose="train",
        episodes=(episode,),
        completions=tuple(scores),
    )
    outputs += merger.handle(
        Message(topic="t", partition=0, offset=0, timestamp_ms=0, record=scored)
    )
    (tree,) = [output.record for output in outputs if isinstance(output.record, MergedTree)]
    return tree


@pytest.mark.slow
async def test_a_trace_leads_from_the_agents_request_to_the_step_that_trained_on_it(
    tmp_path: Path,
) -> None:
    gateway, gateway_spans = _exporting("gateway")
    headers, finished = await _asked(tmp_path, gateway)
    requests = {completion.request_id for completion in finished}
    assert len(requests) == REQUESTS

    asked = [s for s in gateway_spans.get_finished_spans() if s.name == "request_completion"]
    by_trace = {f"{span.context.trace_id:032x}": span for span in asked}
    assert by_trace.keys() == requests
    for request, span in by_trace.items():
        assert [f"{link.context.trace_id:032x}" for link in span.links] == ["a" * 32]
        place = span_ids((("traceparent", headers[request]),))
        assert place is not None
        assert (f"{place.trace_id:032x}", place.span_id) == (request, span.context.span_id)

    save_base(tmp_path / "base", vocab_size=1024)
    trainer, trainer_spans = _exporting("trainer")
    bench = replace(await memory_bench(tmp_path), telemetry=trainer)
    tree = _merged(finished)
    await bench.put_trees([tree])
    await bench.put_steps([scheduled_step(0, [tree])])
    await bench.train(until=0)
    (step,) = [span for span in trainer_spans.get_finished_spans() if span.name == "step"]
    assert {f"{link.context.trace_id:032x}" for link in step.links} == requests
