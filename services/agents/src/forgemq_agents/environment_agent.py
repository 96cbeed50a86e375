"""Plays episodes in an environment of the package `verifiers` 0.1, as it is.

The environment's own rollout asks the gateway, with an OpenAI client that has the episode's base
URL and key; its data set has the tasks, and its rubric makes the reward. Who caused an end decides
whether the episode is scored: what the policy wrote, or a limit that it ran into, is scored by the
rubric; whatever else fails masks the episode.

Written against verifiers 0.1.10. Nothing of it is imported before an environment is loaded.
"""

import copy
import signal
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import UNSET, UnsetType

from forgemq_agents.environment_errors import UnplayableError, chain
from forgemq_agents.environment_rubric import note_failures, score, unscorable
from forgemq_agents.episode import Episode
from forgemq_agents.errors import AgentFailedError, PolicyFailedError
from forgemq_agents.task_file import TaskFile, repeated
from forgemq_contracts.fields import REWARD_SIZE_MAX, TruncationCause
from forgemq_contracts.run import Evaluation

# Of the clients that verifiers makes itself: a turn may be long, and a gateway takes a while to
# start again.
TIMEOUT_S = 3600.0
RETRIES_MAX = 10

_SHOWN_CHARACTERS = 200
"""Of a row in an error."""


def load(name: str) -> "EnvironmentAgent":
    """Load the environment of this name, as verifiers does.

    Only in the main thread: verifiers sets signal handlers, which are set back afterwards.

    Raises:
        UnplayableError: it cannot be imported, is no environment, or cannot score one rollout.
        ImportError: verifiers is not installed.
    """
    import verifiers

    with _kept_signal_handlers():
        try:
            environment = verifiers.load_environment(name)
        except (Exception, SystemExit) as error:
            # Whatever the user's environment raises; verifiers hides it behind an error of its own.
            raise UnplayableError(chain(error)) from error
    if not isinstance(environment, verifiers.Environment):
        kind = type(environment).__name__
        raise UnplayableError(f"load_environment must return a verifiers.Environment, got {kind}")
    if environment.interleaved_rollouts:
        raise UnplayableError(
            "interleaved_rollouts must be off: the gateway keeps the sampled tokens itself, and "
            "has no request that takes tokens"
        )
    if reason := unscorable(environment.rubric):
        raise UnplayableError(reason)
    return EnvironmentAgent(environment)


class EnvironmentAgent:
    """An agent that plays an environment; make it with `load`."""

    def __init__(self, environment: Any) -> None:  # noqa: ANN401 - verifiers is not installed always
        self._environment = environment
        note_failures(environment.rubric)
        self._open_client = _client_class()

    def tasks(self, evaluation: Evaluation, *, is_pool: bool) -> TaskFile:
        """The rows of its data sets as tasks; held out are those of `eval_dataset`.

        Raises:
            UnplayableError: it has no data set, too few rows for the evaluation, or held-out rows
                that train too.
        """
        environment = self._environment
        try:
            training, held_out, both = environment.get_dataset(), [], []
            # Without one, verifiers would evaluate on what trains.
            if evaluation.tasks and environment.build_eval_dataset() is not None:
                held_out = environment.get_eval_dataset()
                both = repeated(map(_own_fields, held_out), training=map(_own_fields, training))
        except Exception as error:
            # A data set is built by the user's code.
            raise UnplayableError(f"no data set: {type(error).__name__}: {error}") from error
        if not len(training):
            raise UnplayableError("its data set has no row")
        if len(held_out) < evaluation.tasks:
            raise UnplayableError(
                f"its eval_dataset has {len(held_out)} rows, and evaluation.tasks is "
                f"{evaluation.tasks}"
            )
        if both:
            raise UnplayableError(
                f"{len(both)} of the {len(held_out)} rows of its eval_dataset are among those of "
                f"its data set, which train; the first is row {both[0]}, counted from 0: "
                f"{str(held_out[both[0]])[:_SHOWN_CHARACTERS]}"
            )
        return TaskFile(training, held_out, evaluation=evaluation, is_pool=is_pool)

    async def __call__(self, episode: Episode) -> None:
        """Play an episode: its task is a row of the data set.

        Raises:
            AgentFailedError: something failed that the policy did not cause.
            PolicyFailedError: what the policy wrote ended the rollout; it is scored.
        """
        async with self._open_client(episode) as client:
            state = await self._rollout(episode, client)
            error = state["error"]
            is_by_policy = error is not None and _is_by_policy(error)
            if error is not None and not is_by_policy:
                raise AgentFailedError(f"the environment failed: {chain(error)}")
            failures = await score(self._environment.rubric, state)
        # A rollout that the policy broke off may lack what a reward function reads: that is a 0.
        if failures and not is_by_policy:
            raise AgentFailedError("; ".join(failures))
        await _report(episode, state)
        if is_by_policy:
            raise PolicyFailedError(chain(error))

    async def _rollout(self, episode: Episode, client: Any) -> Any:  # noqa: ANN401 - as above
        environment = self._environment
        sampling = copy.deepcopy(environment.sampling_args)  # verifiers renames some of them.
        # What is no turn is the environment's time: its tools, and whatever it does before a turn.
        with episode.tool():
            return await environment.rollout(episode.task, client, "policy", sampling)


def _own_fields(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the number that verifiers gives it in its data set."""
    return {name: value for name, value in row.items() if name != "example_id"}


async def _report(episode: Episode, state: Any) -> None:  # noqa: ANN401 - a State of verifiers
    """Leave reward, metrics and the limit that ended the rollout with the episode."""
    reward = float(state["reward"])
    if not abs(reward) <= REWARD_SIZE_MAX:
        raise AgentFailedError(f"the reward must be within 1e12 of 0, got {reward}")
    await episode.report_reward("outcome", reward)
    episode.result = {
        "reward": reward,
        "metrics": dict(state["metrics"] or {}),
        "stop_condition": state.get("stop_condition"),
    }
    limit = _limit(state)
    if limit is not UNSET:
        episode.truncate(limit)


def _limit(state: Any) -> TruncationCause | UnsetType:  # noqa: ANN401 - as above
    """The limit that ended the rollout; UNSET if none did.

    Reaching `max_turns` is the usual end of many environments, a single turn among them. It is a
    limit if the policy has just called a tool, and so would have gone on.
    """
    if state.get("prompt_too_long"):
        return "context_full"
    if not state["trajectory"]:
        return UNSET
    last = state["trajectory"][-1]
    if last["is_truncated"]:
        return "turn_too_long"
    said = last["completion"]
    has_calls = isinstance(said, list) and bool(said and said[-1].get("tool_calls"))
    if has_calls and state.get("stop_condition") == "max_turns_reached":
        return "too_many_turns"
    return UNSET


def _is_by_policy(error: BaseException) -> bool:
    """Whether the policy's words ended a rollout: it said nothing, or a call that nobody can read.

    The second ends a rollout only if the environment names the error in its `stop_errors`.
    """
    from verifiers import EmptyModelResponseError, ToolParseError

    return isinstance(error, EmptyModelResponseError | ToolParseError)


def _client_class() -> Any:  # noqa: ANN401 - openai is not installed always
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    # Reading the certificates takes 20 ms of a core, so not for each episode.
    certificates = ssl.create_default_context()

    class EpisodeClient(AsyncOpenAI):  # type: ignore[misc]  # mypy does not follow openai
        """OpenAI's client of one episode; what it waits for counts as turns of it."""

        def __init__(self, episode: Episode) -> None:
            super().__init__(
                base_url=episode.base_url,
                api_key=episode.key,
                timeout=TIMEOUT_S,
                max_retries=RETRIES_MAX,
                http_client=DefaultAsyncHttpxClient(verify=certificates),
            )
            self._episode = episode

        async def request(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - as openai's
            with self._episode.turn():
                return await super().request(*arguments, **named)

    return EpisodeClient


@contextmanager
def _kept_signal_handlers() -> Iterator[None]:
    """Keep the handlers of this process: those of an environment would end it at once."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
