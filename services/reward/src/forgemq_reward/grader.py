"""Makes the grade of one episode: builds its transcript, asks the process, judges the answer.

The parts: `grading_loop` reads and writes the log and gives the `Grader` its episodes;
`GraderProcesses` chooses a process and tries again if it is lost; a `GraderProcess` starts, times
out and restarts one child process; that child runs `grader_worker`; both talk in `grader_messages`.
"""

import asyncio
from collections.abc import Mapping

import msgspec

from forgemq_contracts.domains import rewards_of
from forgemq_contracts.episodes import FinishedEpisode, GradedEpisode
from forgemq_contracts.grading import GradingCompletion
from forgemq_contracts.run import RunConfiguration
from forgemq_rendering import Rendering
from forgemq_reward.core.pending import HeldCompletion, PendingEpisodes
from forgemq_reward.core.returns import is_graded
from forgemq_reward.core.verdict import Verdict, graded_episode
from forgemq_reward.grader_messages import Load, QueueFunctions
from forgemq_reward.grader_processes import GraderProcesses, Places
from forgemq_reward.settings import RewardSettings, grader_count
from forgemq_reward.transcript import grading_episode

REPORTED = "reported"
"""Name of the grader if the run names no function: the rewards that the agent reported count."""

_WITHOUT_OUTCOME = {
    "import": "imported without an outcome",
    "live": "live traffic without an outcome",
}


class Grader:
    """Grades episodes in child processes, many at once.

    Args:
        rendering: None if no queue names a function.
        cores: That this process may use.
        environ: For the grader processes.
    """

    def __init__(
        self,
        configuration: RunConfiguration,
        settings: RewardSettings,
        *,
        rendering: Rendering | None,
        cores: int,
        environ: Mapping[str, str],
    ) -> None:
        self._configuration = configuration
        self._functions = functions_of(configuration)
        self._rendering = rendering
        self._processes = GraderProcesses(
            Load(
                code_paths=configuration.code_paths,
                queues=tuple(one for one in self._functions.values() if one.names),
            ),
            timeout_s=configuration.rewards.grader_timeout_s,
            count=grader_count(settings, cores=cores),
            gradings_max=settings.gradings_max,
            tries_max=settings.grading_tries_max,
            environ=environ,
        )

    async def start(self) -> None:
        """Load the functions in all processes: a wrong name ends the service at its start."""
        if self._rendering is not None:
            await self._processes.start()

    def places(self, domain: str) -> Places:
        """Those that an episode of this domain takes while it is graded."""
        return self._processes.places(domain)

    async def grade(self, episode: FinishedEpisode, pending: PendingEpisodes) -> GradedEpisode:
        """Grade an episode; one without an honest number is masked."""
        functions = self._functions.get(episode.domain)
        if functions is None:
            verdict = Verdict(error=f"domain {episode.domain!r} has no queue in the run")
            return graded_episode(episode, verdict, grader="", grader_version="")
        if episode.source != "agent":
            return own_grade(episode)
        rewards = rewards_of(self._configuration, domain=episode.domain)
        is_asked = is_graded(episode, settings=rewards)
        if not functions.names or self._rendering is None or not is_asked:
            return graded_episode(episode, Verdict(), grader=REPORTED, grader_version="")
        completions: tuple[GradingCompletion, ...] = ()
        try:
            held = pending.completions_of(episode)
            completions, verdict = await self._ask(episode, held, rendering=self._rendering)
        except (LookupError, ValueError, RecursionError, msgspec.DecodeError) as error:
            # The agent's result and messages may be invalid UTF-8 or nested too deep.
            verdict = Verdict(error=f"no transcript: {error}")
        return graded_episode(
            episode,
            verdict,
            grader=",".join(functions.names),
            grader_version=self._processes.version(episode.domain),
            completions=completions,
        )

    async def _ask(
        self,
        episode: FinishedEpisode,
        held: tuple[HeldCompletion, ...],
        *,
        rendering: Rendering,
    ) -> tuple[tuple[GradingCompletion, ...], Verdict]:
        transcript = grading_episode(episode, held, rendering=rendering)
        return transcript.completions, await self._processes.grade(transcript)

    async def close(self) -> None:
        """End the processes; idempotent."""
        await self._processes.close()


def own_grade(episode: FinishedEpisode) -> GradedEpisode:
    """The grade of an import or of live traffic: its own rewards.

    Functions judge sampled completions, which an import has not, for a task of the queue's task
    source, which live traffic has not.
    """
    has_outcome = any(reward.name == "outcome" for reward in episode.rewards)
    verdict = Verdict() if has_outcome else Verdict(error=_WITHOUT_OUTCOME[episode.source])
    return graded_episode(episode, verdict, grader=REPORTED, grader_version="")


def functions_of(configuration: RunConfiguration) -> dict[str, QueueFunctions]:
    """The functions of every queue, by domain."""
    return {
        queue.domain: QueueFunctions(
            domain=queue.domain, outcome=queue.outcome, process=queue.process, speed=queue.speed
        )
        for queue in configuration.queues
    }


async def load_rendering(configuration: RunConfiguration) -> Rendering | None:
    """Load the model's rendering; None if no queue has a function that needs a transcript."""
    if not any(functions.names for functions in functions_of(configuration).values()):
        return None
    return await asyncio.to_thread(
        Rendering.load,
        configuration.model.path,
        renderer=configuration.model.renderer,
        history=configuration.episodes.history,
    )
