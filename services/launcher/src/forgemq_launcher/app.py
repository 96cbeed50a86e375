"""One run from its first process to its report; `RunningRun.play` is the order of things."""

import msgspec
from rich.console import Console

from forgemq_audit import group_index, guarantees
from forgemq_audit.run_report import audit_run
from forgemq_bus.log import Log
from forgemq_bus.partitions import partition_counts
from forgemq_contracts.players import shortage
from forgemq_contracts.run import EndedRun, StartedRun
from forgemq_contracts.speculation import unpublished_head
from forgemq_contracts.topics import (
    ENDED_RUNS,
    REQUESTED_ENDS,
    REQUESTED_LANES,
    STARTED_RUNS,
    Topic,
)
from forgemq_launcher import exit_status
from forgemq_launcher.display.curves import CurveWriter
from forgemq_launcher.display.evaluation_report import evaluation_tables
from forgemq_launcher.display.panel import PanelView, ShownService
from forgemq_launcher.display.report_files import closing, write_report
from forgemq_launcher.display.run_display import RunDisplay
from forgemq_launcher.display.screen import Screen
from forgemq_launcher.outcome import FAILURES, Outcome, watch_run
from forgemq_launcher.records.announcement import check_unfinished, next_start
from forgemq_launcher.records.evaluation import evaluation_of, evaluation_values
from forgemq_launcher.records.follower import Follower
from forgemq_launcher.records.run_log import open_run_log
from forgemq_launcher.records.run_results import result_values
from forgemq_launcher.records.run_topics import write_end, write_start
from forgemq_launcher.run_setup import RunSetup
from forgemq_launcher.upkeep.run_processes import RunProcesses
from forgemq_launcher.upkeep.stop_signal import StopSignal
from forgemq_launcher.upkeep.supervisor import ServiceStatus
from forgemq_launcher.whole_files import write_json
from forgemq_run_view import view
from forgemq_shell.clock import now_ms

CONSUMES: tuple[Topic, ...] = tuple(
    dict.fromkeys(
        (
            *(STARTED_RUNS, REQUESTED_LANES, REQUESTED_ENDS),
            *(*view.TOPICS, *guarantees.TOPICS, *group_index.COMPARED),
        )
    )
)
PRODUCES: tuple[Topic, ...] = (STARTED_RUNS, REQUESTED_ENDS, ENDED_RUNS)


class RunningRun:
    """One run while it is up.

    Lifecycle: `play` once. It takes down everything it started, whatever happens in between.
    """

    def __init__(self, setup: RunSetup, console: Console) -> None:
        self._setup = setup
        self._screen = Screen(console)
        self._processes = RunProcesses(setup, note=self._screen.say)
        self._stop = StopSignal(kill=self._processes.kill, note=self._screen.say)

    async def play(self) -> int:
        """Bring the run up, keep it up until it ends, take it down, audit and report it.

        Returns:
            The exit status. 0: completed and every guarantee held. 1: failed, or one did not
            hold. 130: interrupted.
        """
        configuration = self._setup.configuration
        self._stop.listen()
        try:
            # They take longest. A resume may be refused by what the log says, so there they wait.
            if not self._setup.is_resumed:
                self._processes.start_engines()
            if not await self._processes.start_broker(stop=self._stop.event):
                self._screen.say(self._next_step())
                return exit_status.INTERRUPTED
            connection = self._processes.connection
            async with open_run_log(connection, configuration, blobs=self._setup.blobs) as log:
                started = await self._stop.unless_killed(self._announce_run(log))
                if started is None:
                    return self._left_by_kill()
                outcome = await self._play_announced(log, started)
                self._processes.has_failed = outcome.reason == "failed"
                await self._processes.stop_services()
                status = await self._stop.unless_killed(self._end_run(log, started, outcome))
                return self._left_by_kill() if status is None else status
        except FAILURES as error:
            self._processes.has_failed = True
            self._screen.close()
            self._screen.say(f"failed: {error}")
            return exit_status.FAILED
        finally:
            self._screen.close()
            await self._processes.stop()

    async def _announce_run(self, log: Log) -> StartedRun:
        """Create what is missing of the topics; write the record that every service waits for.

        Raises:
            ConfigurationError: a resume changes what must stay, or the run is completed.
            MachineError: the engines of a resumed run cannot be started.
            EngineServerError: the same.
        """
        configuration, is_resumed = self._setup.configuration, self._setup.is_resumed
        if is_resumed:
            await check_unfinished(log, configuration)
        started = await next_start(
            log, configuration, blobs=self._setup.blobs, now_ms=now_ms(), plays_here=True
        )
        found = (*started.changes, *self._setup.task_changes)
        tasks = self._setup.tasks or started.tasks
        started = msgspec.structs.replace(started, changes=found, tasks=tasks)
        self._screen.say(f"the run has {len(partition_counts(configuration))} topics")
        for change in started.changes:
            self._screen.say(f"changed by this resume: {change}")
        unpublished = unpublished_head(configuration.speculation, steps=configuration.trainer.steps)
        for warning in filter(None, (shortage(configuration), unpublished)):
            self._screen.say(f"warning: {warning}")
        if is_resumed:
            self._processes.start_engines()
        self._setup.folder.keep(configuration)
        self._setup.folder.keep_tasks(self._setup.tasks)
        await write_start(self._processes.connection, started)
        return started

    async def _play_announced(self, log: Log, started: StartedRun) -> Outcome:
        """Play a run whose start is on the log; a failure is its outcome, which goes there too."""
        try:
            addresses = self._processes.plan_services()
            return await self._watch_run(log, started, console_url=addresses.console_url)
        except FAILURES as error:
            return Outcome("failed", str(error))

    async def _watch_run(self, log: Log, started: StartedRun, *, console_url: str) -> Outcome:
        """Start the services; keep everything up and on the screen until the run is over."""
        limit, folder = self._setup.settings.groups_failed_max, self._setup.folder.path
        follower = Follower(log, started, groups_failed_max=limit)
        display = RunDisplay(
            self._screen,
            curves=CurveWriter(folder, for_tensorboard=self._setup.settings.tensorboard),
            state=follower.state,
            panel_view=lambda: self._panel_view(console_url),
        )
        self._screen.open()
        try:
            outcome = await watch_run(
                self._processes,
                follower,
                display,
                stop=self._stop,
                trains=not self._setup.samples,
            )
        finally:
            self._screen.close()
        self._screen.say(f"{outcome.reason}; stopping services")
        return outcome

    def _panel_view(self, console_url: str) -> PanelView:
        engines = self._processes.engines
        return PanelView(
            engine_status=engines.status(),
            is_engine_up=engines.is_up,
            services=tuple(
                _shown_service(each, is_silent=each.name in self._processes.silent_services)
                for each in self._processes.service_statuses()
            ),
            footer=f"{console_url}   Ctrl-C stops",
            events=self._screen.events,
            is_judging=self._setup.samples > 0,
        )

    async def _end_run(self, log: Log, started: StartedRun, outcome: Outcome) -> int:
        """Write the end of a run whose services have stopped, and its report if it has one."""
        if outcome.reason != "completed":
            return await self._leave_open(log, started, outcome)
        if self._setup.samples:
            return await self._report_evaluation(log, started)
        return await self._report_run(log, started)

    def _left_by_kill(self) -> int:
        """Say how a run goes on whose broker was killed, so that its end is not on the log."""
        self._screen.say(f"killed; {self._next_step()}")
        return exit_status.INTERRUPTED

    def _next_step(self) -> str:
        command = self._setup.resume_command
        return f"continue with: {command}" if command else "to judge the model, begin again"

    async def _leave_open(self, log: Log, started: StartedRun, outcome: Outcome) -> int:
        """Write the end of a run that a resume may continue; its groups stay open.

        If somebody asked for the end there is a report, too. A person at the keyboard waits for the
        prompt, and `forgemq report` makes one later.
        """
        run, ended_ms = self._setup.folder.run, now_ms()
        # First, because the broker may be what failed: then its end cannot be written.
        self._screen.say(outcome.detail or "open groups stay open")
        ended = EndedRun(run=run, reason=outcome.reason, ended_ms=ended_ms, detail=outcome.detail)
        await write_end(self._processes.connection, ended)
        if outcome.is_requested and not self._setup.samples:
            await self._report_open(log, started, now_ms=ended_ms)
        self._screen.say(self._next_step())
        is_interrupted = outcome.reason == "interrupted"
        return exit_status.INTERRUPTED if is_interrupted else exit_status.FAILED

    async def _report_open(self, log: Log, started: StartedRun, *, now_ms: int) -> None:
        """Audit and report a run that has ended with open groups."""
        report, reader = await audit_run(log, started, reason="interrupted", now_ms=now_ms)
        folder = self._setup.folder
        write_report(report, reader.view.state(now_ms=now_ms), folder=folder.path)
        self._screen.print(closing(report))
        self._screen.say(f"report: {folder / 'report.json'} and report.png")

    async def _report_run(self, log: Log, started: StartedRun) -> int:
        """Audit a completed run from its log, then write its end and its report."""
        self._screen.say("checking the guarantees on the log")
        ended_ms, folder = now_ms(), self._setup.folder
        report, reader = await audit_run(log, started, reason="completed", now_ms=ended_ms)
        results = result_values(report)
        ended = EndedRun(run=started.run, reason="completed", ended_ms=ended_ms, results=results)
        # First, because the report can be written again from the log: its disk may be full.
        await write_end(self._processes.connection, ended)
        write_report(report, reader.view.state(now_ms=ended_ms), folder=folder.path)
        self._screen.print(closing(report))
        self._screen.say(f"report: {folder / 'report.json'} and report.png")
        return exit_status.OK if all(report.guarantees.values()) else exit_status.FAILED

    async def _report_evaluation(self, log: Log, started: StartedRun) -> int:
        """Write the end of a run that judged a model, and what it found."""
        found = await evaluation_of(log, started, samples=self._setup.samples)
        await write_end(
            self._processes.connection,
            EndedRun(
                run=started.run,
                reason="completed",
                ended_ms=now_ms(),
                results=evaluation_values(found),
            ),
        )
        path = self._setup.folder / "pass_at_k.json"
        write_json(path, found)
        for table in evaluation_tables(found):
            self._screen.print(table)
        self._screen.say(f"report: {path}")
        return exit_status.OK if all(each.pass_at_k for each in found) else exit_status.FAILED


def _shown_service(status: ServiceStatus, *, is_silent: bool) -> ShownService:
    restarts = f"({status.restarts})" if status.restarts else ""
    detail = f"{restarts} silent" if is_silent else restarts
    is_up = status.pid is not None and not is_silent
    return ShownService(name=status.name, is_up=is_up, detail=detail)
