"""What tests of whole runs with several engines share: the engines, and what a run left."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from forgemq_contracts import topics
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.weights import LoadedWeights, PublishedWeights
from tests.integration.launched_run import DIALOGUE, LaunchedRun
from tests.integration.run_log import accounts, records_in

RUN_S_MAX = 900.0


@dataclass(frozen=True, kw_only=True)
class FleetRun:
    """A whole run on the real broker: `play` it, then read what it left.

    Attributes:
        run: Its processes.
        run_id: Its id.
        bootstrap: Address of the broker.
        steps: That it trains.
        lanes: Its engines.
    """

    run: LaunchedRun
    run_id: str
    bootstrap: str
    steps: int
    lanes: int = 1

    @classmethod
    def on(
        cls,
        bootstrap: str,
        run_id: str,
        folder: Path,
        *,
        steps: int,
        lanes: int = 1,
        environ: Mapping[str, str],
    ) -> "FleetRun":
        """Start nothing yet."""
        run = LaunchedRun(folder, {"FORGEMQ_KAFKA": bootstrap, **environ})
        return cls(run=run, run_id=run_id, bootstrap=bootstrap, steps=steps, lanes=lanes)

    def play(self, *overrides: str, run_file: str = DIALOGUE) -> None:
        """Play it to its end; every guarantee holds then, and no process is left.

        G1 and G2 are also read from the log, without the product's audit.
        """
        try:
            self.run.start(
                run_file,
                f"run={self.run_id}",
                f"trainer.steps={self.steps}",
                f"log.lanes={self.lanes}",
                "evaluation.tasks=0",
                "log.keep_for_replay=true",
                *overrides,
            )
            status = self.run.wait_for_end(within_s=RUN_S_MAX)
            assert self.run.left_behind() == []
        finally:
            self.run.close()
        assert status == 0, self.run.story()
        report = self.run.report(self.run_id)
        held = dict.fromkeys(("G1", "G2", "G3", "G4", "G5"), True)
        assert report["guarantees"] == held, report["guarantees_checked"]
        assert (report["steps"], report["groups_open"]) == (self.steps, 0)
        assert report["staleness_max"] <= report["staleness_bound"]
        log = accounts(
            self.bootstrap, run=self.run_id, blobs=self._blobs, layout=self.configuration
        )
        log.assert_exactly_once()
        assert list(log.surviving_steps()) == list(range(self.steps))

    def published(self) -> list[PublishedWeights]:
        """Every publication of a durable copy, in order."""
        return [each for each in self.records(topics.PUBLISHED_WEIGHTS) if each.is_durable]

    def published_early(self) -> list[tuple[int, int]]:
        """Lineage and version of every publication that came before the durable copy."""
        records = self.records(topics.PUBLISHED_WEIGHTS)
        return [(each.lineage, each.version) for each in records if not each.is_durable]

    def publications(self) -> list[tuple[int, int]]:
        """Lineage and version of every durable copy that was published, in order."""
        return [(each.lineage, each.version) for each in self.published()]

    def loaded(self, lane: int) -> list[LoadedWeights]:
        """What a lane has served of this run, in order."""
        loaded = self.records(topics.LOADED_WEIGHTS)
        # Lineage 0 is what the engine started with.
        return [each for each in loaded if each.lane == lane and each.lineage > 0]

    def records(self, topic: topics.Topic) -> list[Any]:
        """Every record of a topic, decoded, one partition after another."""
        layout, where = self.configuration, self._blobs
        return list(records_in(self.bootstrap, topic, run=self.run_id, blobs=where, layout=layout))

    def events(self, service: str, *names: str) -> list[dict[str, Any]]:
        """Every event of these names in a service's log, in order over all its lives."""
        log = self.run.runs / self.run_id / "logs" / f"{service}.log"
        lines = log.read_text(errors="replace").splitlines()
        events = [json.loads(line) for line in lines if line.startswith("{")]
        return [event for event in events if event.get("event") in names]

    @property
    def configuration(self) -> RunConfiguration:
        """The run's, as the launcher wrote it down."""
        written = self.run.runs / self.run_id / "configuration.json"
        return msgspec.json.decode(written.read_bytes(), type=RunConfiguration)

    @property
    def _blobs(self) -> str:
        return self.run.environ.get("FORGEMQ_BLOBS") or str(self.run.blobs(self.run_id))
