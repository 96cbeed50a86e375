"""A run whose services a test starts and stops one by one, as a person or a cluster does."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from aiokafka.admin import AIOKafkaAdminClient
from rich.console import Console

from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.kafka_connection import client_settings
from forgemq_bus.names import in_run
from forgemq_bus.partitions import partitions_of
from forgemq_contracts import topics
from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.dispatch import run_tool
from forgemq_launcher.run_folder import RunFolder
from forgemq_launcher.upkeep.machine import listening_socket
from forgemq_launcher.upkeep.services import Addresses, service_specs
from tests.integration.launched_run import FORGEMQ, ROOT
from tests.integration.run_log import records_in

HOST = "127.0.0.1"
SHOWN_CHARACTERS_MAX = 4000
LOOK_EVERY_S = 0.3


class ServiceProcess:
    """One process of the run, and what it says."""

    def __init__(self, command: list[str], log: Path, **settings: Any) -> None:
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, **settings
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def name(self) -> str:
        return self.log.stem

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Its events of these names so far."""
        whole, _, _ = self.log.read_text(errors="replace").rpartition("\n")
        events = [json.loads(line) for line in whole.splitlines() if line.startswith('{"')]
        return [event for event in events if event["event"] in names]

    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def stop(self, *, within_s: float) -> int:
        """Send SIGTERM and wait for the exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(within_s)

    def close(self) -> None:
        """Kill it if it runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def story(self) -> str:
        """The end of its log, for the message of a failed assertion."""
        return self.log.read_text(errors="replace")[-SHOWN_CHARACTERS_MAX:]


class HandRun:
    """One run without a launcher.

    Lifecycle: `create`, `start` and `ServiceProcess.stop` in any order, `close`.

    Args:
        run_id: Of the run.
        folder: For its files.
        bootstrap: Address of the broker.
        engine_url: Of its one engine.
        environ: For all services.
    """

    def __init__(
        self,
        run_id: str,
        *,
        folder: Path,
        bootstrap: str,
        engine_url: str,
        environ: dict[str, str],
    ) -> None:
        self.run_id = run_id
        self.processes: list[ServiceProcess] = []
        self._folder = RunFolder(folder / "runs" / run_id)
        self._bootstrap = bootstrap
        self._engine_url = engine_url
        own = {name: text for name, text in os.environ.items() if not name.startswith("FORGEMQ_")}
        run = {"FORGEMQ_RUN": run_id, "FORGEMQ_KAFKA": bootstrap, "FORGEMQ_BLOBS": self.blobs}
        self._environ = {**own, **run, **environ}
        # All gateways share it, as those of one machine do: it answers while any of them is up.
        self._listener = listening_socket(HOST, wanted=0)

    @property
    def blobs(self) -> str:
        """Address of the run's blob store."""
        return str(self._folder / "blobs")

    @property
    def configuration(self) -> RunConfiguration:
        """The run's."""
        return self._folder.configuration()

    def create(self, run_file: str, *overrides: str) -> None:
        """Announce the run on the broker."""
        resolved = self._folder.path.parent / "resolved.json"
        resolved.parent.mkdir(parents=True)
        tool = partial(run_tool, environ=self._environ, console=Console(file=io.StringIO()))
        file = str(ROOT / run_file)
        assert tool(["resolve", file, *overrides, "--to", str(resolved)]) == 0
        self._folder.make(msgspec.json.decode(resolved.read_bytes(), type=RunConfiguration))
        assert tool(["create", file, *overrides]) == 0
        port = self._listener.getsockname()[1]
        addresses = Addresses(
            kafka=self._bootstrap,
            engine_urls=(self._engine_url,),
            host=HOST,
            gateway_port=port,
            gateway_fd=self._listener.fileno(),
            console_port=0,
            console_fd=-1,
            admin_key=self._folder.admin_key(),
        )
        specs = service_specs(
            self.configuration,
            folder=self._folder,
            addresses=addresses,
            environ=self._environ,
            gateways=2,  # Each then has a port of its own for the others.
        )
        self._specs = {spec.module.removeprefix("forgemq_"): spec for spec in specs}

    def start(self, service: str) -> ServiceProcess:
        """Start one more process of this service."""
        spec = self._specs[service]
        count = sum(each.name.startswith(f"{service}-") for each in self.processes)
        # A name among its replicas would keep the partitions of a process that ends for good.
        hidden = "FORGEMQ_SERVICE_INSTANCE"
        process = ServiceProcess(
            [sys.executable, "-m", spec.module, *spec.arguments],
            self._folder / "logs" / f"{service}-{count}.log",
            env={name: text for name, text in spec.environ.items() if name != hidden},
            pass_fds=spec.inherited_fds,
        )
        self.processes.append(process)
        return process

    def running(self, service: str) -> list[ServiceProcess]:
        """The processes of this service that run, the oldest first."""
        own = [each for each in self.processes if each.name.startswith(f"{service}-")]
        return [each for each in own if each.status() is None]

    def start_end(self) -> ServiceProcess:
        """Start `forgemq end`, which waits until the run is played, and then writes its report."""
        process = ServiceProcess(
            [str(FORGEMQ), "end", self.run_id, "--to", str(self._folder / "report")],
            self._folder / "logs" / "end.log",
            env=self._environ,
        )
        self.processes.append(process)
        return process

    def report(self) -> dict[str, Any]:
        """What `forgemq end` wrote."""
        parsed: dict[str, Any] = json.loads((self._folder / "report/report.json").read_text())
        return parsed

    def wait_for(self, look: Callable[[], object], *, within_s: float, what: str) -> None:
        """Wait until `look` finds something.

        Fails after `within_s`, or as soon as a process ends by itself with another status than 0.
        """
        deadline_s = time.monotonic() + within_s
        while not look():
            failed = [each for each in self.processes if each.status()]
            assert not failed, f"{failed[0].name} failed before {what}:\n{failed[0].story()}"
            assert time.monotonic() < deadline_s, f"not in {within_s:.0f} s: {what}\n{self.story()}"
            time.sleep(LOOK_EVERY_S)

    def members(self, group: str) -> int:
        """Number of processes in a consumer group of the run."""

        async def read() -> int:
            admin = AIOKafkaAdminClient(**client_settings(self._connection))
            await admin.start()
            try:
                name = in_run(group, run=self.run_id)
                (response,) = await admin.describe_consumer_groups([name])
            finally:
                await admin.close()
            return len(response.groups[0][5])

        return asyncio.run(read())

    def records(self, topic: topics.Topic) -> list[Any]:
        """Every record of a topic, decoded, one partition after another."""
        return list(
            records_in(
                self._bootstrap,
                topic,
                run=self.run_id,
                blobs=self.blobs,
                layout=self.configuration,
            )
        )

    def ends(self, topic: topics.Topic) -> dict[int, int]:
        """Where each partition of a topic ends now."""

        async def read() -> dict[int, int]:
            log = KafkaLog(self._connection, run=self.run_id)
            try:
                found = await log.end_positions(partitions_of(topic, self.configuration))
            finally:
                await log.close()
            return {place.partition: end for place, end in found.items()}

        return asyncio.run(read())

    def story(self) -> str:
        """The end of the log of every process that runs."""
        running = [each for each in self.processes if each.status() is None]
        return "\n".join(f"{each.name}:\n{each.story()[-600:]}" for each in running)

    def close(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            process.close()
        self._listener.close()

    @property
    def _connection(self) -> KafkaConnection:
        return KafkaConnection(bootstrap=self._bootstrap)
