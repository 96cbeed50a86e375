"""Plays episodes in an environment of `verifiers.v1`, which is verifiers from 0.4 on, as it is.

Its taskset has the tasks, its harness plays them, and its reward functions score what was played.
verifiers takes the harness's requests at a server of its own, and passes each one on as it came, to
the gateway under the episode's address. Whatever fails masks the episode; what the policy wrote, or
a limit that it ran into, is scored.

Written against verifiers 0.4.0. Nothing of it is imported before an environment is loaded.
"""

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from forgemq_agents.environment_errors import UnplayableError, chain
from forgemq_agents.episode import Episode
from forgemq_agents.errors import AgentFailedError, ContextFullError
from forgemq_agents.task_file import TaskFile, repeated
from forgemq_agents.task_size import size_fault
from forgemq_contracts.fields import REWARD_SIZE_MAX, TruncationCause
from forgemq_contracts.run import Evaluation

EPISODES_OF_A_SERVING = 64
"""Played with one set of servers, which keep a connection pool of each until they end: 0.7 MB with
verifiers 0.4.0. Tool servers that episodes share start again with the next set."""

_CONTEXT_FULL = "context_length_exceeded"
_LIMITS: dict[str, TruncationCause] = {
    "max_turns": "too_many_turns",
    "max_input_tokens": "declared",
    "max_output_tokens": "declared",
    "max_total_tokens": "declared",
    "compaction_failed": "declared",
}


def load(name: str) -> "TasksetAgent":
    """Load what a module's `load_environment` returns, or the environment of a taskset's id.

    Raises:
        UnplayableError: it cannot be imported, is no environment, or cannot be played here.
    """
    try:
        environment = _environment(name)
    except (Exception, SystemExit) as error:
        # Whatever the user's environment raises.
        raise UnplayableError(chain(error)) from error
    return TasksetAgent(environment, seat=_seat(environment))


def _environment(name: str) -> Any:  # noqa: ANN401 - verifiers is not installed always
    from verifiers import v1

    module = v1.import_taskset(name)
    if hasattr(module, "load_environment"):
        environment = module.load_environment()
    else:
        environment = v1.load_environment(v1.resolve_env_config({"taskset": {"id": name}}))
    if not isinstance(environment, v1.Env):
        kind = type(environment).__name__
        raise TypeError(f"load_environment must return a verifiers.v1.Env, got {kind}")
    return environment


def _seat(environment: Any) -> str:  # noqa: ANN401 - as above
    """The one agent of an environment that samples from the policy.

    Raises:
        UnplayableError: several do, none does, or verifiers would play an episode again by itself.
    """
    from verifiers.v1.configs.agent import agent_config_fields

    config = environment.config
    agents = agent_config_fields(config)
    seats: list[str] = [name for name, agent in agents.items() if agent.client is None]
    if len(seats) != 1:
        raise UnplayableError(
            "exactly one agent may sample from the policy, and so have no client of its own: an "
            f"episode has one reward. Here these do: {', '.join(seats) or 'none'}"
        )
    for where, retries in (("env", config.retries), (seats[0], agents[seats[0]].retries)):
        if retries.max_retries or any(rule.max_retries for rule in retries.rules):
            raise UnplayableError(
                f"{where}.retries must be 0: the turns of a failed try would train with the "
                "reward of the next one; a masked episode is played again by the run"
            )
    return seats[0]


@dataclass(slots=True)
class _Serving:
    """An environment whose servers run, until `is_over`, in a task of their own."""

    environment: Any
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    begun: int = 0
    playing: int = 0


class TasksetAgent:
    """An agent that plays an environment; make it with `load`.

    Attributes:
        is_scored: An episode that its environment gives no reward is masked.
    """

    is_scored = True

    def __init__(self, environment: Any, *, seat: str) -> None:  # noqa: ANN401 - as above
        self._environment = environment
        self._seat = seat
        self._task_type = type(environment.taskset).task_type()
        self._newest: _Serving | None = None
        self._starting = asyncio.Lock()

    def tasks(self, evaluation: Evaluation, *, is_pool: bool) -> TaskFile:
        """The tasks of its taskset; held out are the last `evaluation.tasks` of them.

        Raises:
            UnplayableError: the taskset is endless or too small, or held-out tasks train too.
        """
        taskset = self._environment.taskset
        if not taskset.bounded:
            raise UnplayableError(
                "its taskset is endless: bound it, as by environment.taskset.take(1000)"
            )
        rows = self._rows()
        count = len(rows) - evaluation.tasks
        if count < 1:
            raise UnplayableError(
                f"its taskset has {len(rows)} tasks, of which the last evaluation.tasks, "
                f"{evaluation.tasks}, are held out: none is left to train"
            )
        training, held_out = rows[:count], rows[count:]
        both = repeated(map(_own_fields, held_out), training=map(_own_fields, training))
        if both:
            raise UnplayableError(
                f"{len(both)} of its last {len(held_out)} tasks, which are held out, train too; "
                f"the first is task {count + both[0]}, counted from 0"
            )
        return TaskFile(training, held_out, evaluation=evaluation, is_pool=is_pool)

    def _rows(self) -> list[dict[str, Any]]:
        """Its tasks as JSON has them.

        Raises:
            UnplayableError: there are none, or an episode could not play one of them.
        """
        rows = list[dict[str, Any]]()
        try:
            for task in self._environment.taskset:
                rows.append(_row(task, self._task_type, number=len(rows)))
        except UnplayableError:
            raise
        except (Exception, SystemExit) as error:
            # A taskset is loaded by the user's code.
            raise UnplayableError(f"no tasks: {chain(error)}") from error
        return rows

    async def __call__(self, episode: Episode) -> None:
        """Play an episode: its task is the data of a task of the taskset.

        Raises:
            AgentFailedError: something failed that the policy did not cause.
            ContextFullError: the gateway refused a request that does not fit the context.
        """
        async with self._served() as environment:
            task = self._task_type(
                self._task_type.data_type().model_validate(episode.task),
                environment.config.taskset.task,
            )
            played = await environment.run_episode(task, _context(episode))
        if played.errors:
            raise AgentFailedError(f"the environment failed: {_error(played.last_error)}")
        trace = self._own_trace(played)
        episode.tool_s += trace.timing.agent.harness.duration
        await _report(episode, trace, is_scored=self.is_scored)

    def _own_trace(self, played: Any) -> Any:  # noqa: ANN401 - as above
        traces = [trace for trace in played.traces if trace.agent.name == self._seat]
        if len(traces) != 1:
            raise AgentFailedError(
                f"its agent {self._seat} ran {len(traces)} times in one episode, which has one "
                "reward: it must run once"
            )
        return traces[0]

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[Any]:
        """An environment whose servers run as long as this block."""
        async with self._starting:
            serving = self._newest
            if serving is None or serving.begun == EPISODES_OF_A_SERVING:
                serving = self._newest = await self._started()
            serving.begun += 1
            serving.playing += 1
        try:
            yield serving.environment
        finally:
            serving.playing -= 1
            if serving.begun == EPISODES_OF_A_SERVING and not serving.playing:
                serving.is_over.set()

    async def _started(self) -> _Serving:
        # verifiers keeps the servers at the environment, so each set has a copy of its own.
        serving = _Serving(environment=copy.copy(self._environment))
        is_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # It outlives the episode that needs it first, and ends with the loop at the latest.
        serving.task = asyncio.create_task(_serve(serving, is_up))  # noqa: TID251
        try:
            await is_up
        except asyncio.CancelledError:
            # They may hang while they start, and would then not see that it is over.
            serving.task.cancel()
            raise
        return serving


async def _serve(serving: _Serving, is_up: asyncio.Future[None]) -> None:
    """Keep the servers running, in one task: verifiers must stop them where it started them."""
    try:
        async with serving.environment.serving():
            if not is_up.done():
                is_up.set_result(None)
            await serving.is_over.wait()
    except BaseException as error:
        # Of the end, only the log of this process tells: all episodes are over by then.
        if is_up.done():
            raise
        # Whatever the servers of a user's tools raise: an episode waits for it.
        is_up.set_exception(AgentFailedError(f"its servers do not start: {chain(error)}"))


def _row(task: Any, declared: Any, *, number: int) -> dict[str, Any]:  # noqa: ANN401 - as above
    """The data of a task as JSON has it, from which each episode makes the task again.

    Raises:
        UnplayableError: that task would be another one, or none.
    """
    try:
        # Also what is None: its field may have another default.
        row: dict[str, Any] = task.data.model_dump(mode="json")
        written = msgspec.json.encode(row)
        read = msgspec.json.decode(written)
        fault = size_fault(written)
        why = _other_kind(task, declared) or (fault and f"its data {fault}")
        why = why or _changed(row, read, by="JSON")
        if not why:
            made = type(task.data).model_validate(read).model_dump(mode="json")
            why = _changed(row, made, by=f"{type(task.data).__name__}.model_validate")
    except Exception as error:
        # The kinds of tasks are the user's code.
        raise _unplayable(number, chain(error)) from error
    if why:
        raise _unplayable(number, why)
    return row


def _unplayable(number: int, why: str) -> UnplayableError:
    return UnplayableError(f"task {number}, counted from 0: {why}")


def _other_kind(task: Any, declared: Any) -> str:  # noqa: ANN401 - as above
    """Why a task of what the taskset declares is not this task; "" if it is."""
    for found, kind in ((task, declared), (task.data, declared.data_type())):
        if type(found) is not kind:
            return (
                f"it is of the class {type(found).__name__}, and each episode makes it again of "
                f"{kind.__name__}, which the taskset declares"
            )
    fields = type(task.data).model_fields.items()
    excluded = ", ".join(name for name, each in fields if each.exclude)
    return f"no episode has what is excluded from its data: {excluded}" if excluded else ""


def _changed(row: dict[str, Any], again: dict[str, Any], *, by: str) -> str:
    """Which fields of a row are others after it was made again; "" if none is."""
    names = ", ".join(name for name, value in row.items() if again.get(name) != value)
    return f"{by} changes the value of {names}" if names else ""


def _own_fields(row: dict[str, Any]) -> dict[str, Any]:
    """A task without the number that verifiers gives it in its taskset."""
    return {name: value for name, value in row.items() if name != "idx"}


def _context(episode: Episode) -> Any:  # noqa: ANN401 - as above
    from verifiers import v1

    # A key can be given to verifiers by a variable of the process only, so the address has it.
    return v1.ModelContext(model="policy", client=v1.EvalClientConfig(base_url=episode.session_url))


async def _report(episode: Episode, trace: Any, *, is_scored: bool) -> None:  # noqa: ANN401 - a Trace
    """Leave reward, metrics and the limit that ended the rollout with the episode."""
    if not trace.ok:
        raise _failure(trace.last_error)
    # A harness may end in peace after a refused request: only a full context is the policy's doing.
    refused = trace.calls[-1].error if trace.calls else None
    if refused is not None and not _is_context_full(refused):
        raise _failure(refused)
    if trace.is_timeout:
        raise AgentFailedError(f"out of time: {trace.stop_condition}")
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored:
        raise AgentFailedError(f"no value of the reward {', '.join(unscored)}")
    if is_scored and not trace.rewards:
        # verifiers takes it for a 0, and the policy would pay for it.
        raise AgentFailedError("no reward: neither its task nor its environment gave one")
    if not abs(trace.reward) <= REWARD_SIZE_MAX:
        raise AgentFailedError(f"the reward must be within 1e12 of 0, got {trace.reward}")
    await episode.report_reward("outcome", trace.reward)
    episode.result = {
        "reward": trace.reward,
        "rewards": {name: reward.value for name, reward in trace.rewards.items()},
        "metrics": dict(trace.metrics),
        "stop_condition": trace.stop_condition,
    }
    limit = _limit(trace)
    if limit is not UNSET:
        episode.truncate(limit)


def _limit(trace: Any) -> TruncationCause | UnsetType:  # noqa: ANN401 - as above
    """The limit that ended the rollout; UNSET if none did."""
    if trace.calls and trace.calls[-1].error is not None:
        return "context_full"
    if trace.stop_condition in _LIMITS:
        return _LIMITS[trace.stop_condition]
    return "turn_too_long" if trace.is_truncated else UNSET


def _failure(error: Any) -> Exception:  # noqa: ANN401 - an Error of verifiers
    if _is_context_full(error):
        return ContextFullError(error.message, status=400, code=_CONTEXT_FULL)
    return AgentFailedError(f"the environment failed: {_error(error)}")


def _is_context_full(error: Any) -> bool:  # noqa: ANN401 - as above
    return error.status_code == 400 and _CONTEXT_FULL in error.message


def _error(error: Any) -> str:  # noqa: ANN401 - as above
    return f"{error.type}: {error.message}".removesuffix(": ")
