"""`Episode`: the argument of a user's `async def play(episode)`."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from forgemq_agents.completion import Completion, Message, Tool, read_completion
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.requests import JsonRequests
from forgemq_agents.tool_clock import ToolClock
from forgemq_contracts.admin import Claim, RewardRequest
from forgemq_contracts.context_cuts import CONTEXT_HEADER, ContextCut
from forgemq_contracts.fields import TruncationCause
from forgemq_settings.user_code import for_user_code
from forgemq_telemetry.telemetry import Telemetry


class Episode:
    """One attempt at one task: the way to the model, and what to report at the end.

    Any OpenAI client may be used instead of `chat`: point it at `base_url` with `key`, or at
    `session_url`. An exception out of `play` masks the episode, except a full context and
    `PolicyFailedError`: those are what the policy did, and end the episode as truncated.

    Attributes:
        task: As the task source made it.
        episode_id: `<group>.<index>.<attempt>`.
        temperature: The gateway samples with it, whatever a request asks for.
        context_tokens_max: Of context and output together; 0 if the gateway does not tell.
        key: API key for chat completions of this episode alone.
        base_url: OpenAI base URL for that key.
        session_url: The same with the key in its path, for clients whose key cannot be set.
        environ: Environment for programs that the agent starts: that of the agents process
            without the credentials of the run, as the admin key (`for_user_code`).
        result: Reported at the end; any JSON value. Graders see it as `episode.result`.
        tool_s: Seconds spent in tools; add to it, or run tools inside `tool`, which counts them.
        virtual_s: Time on the environment's own clock, if it has one.
        truncated_by: As `truncate` set it; UNSET leaves it to the gateway.
    """

    def __init__(
        self,
        claim: Claim,
        *,
        gateway: GatewayClient,
        requests: JsonRequests,
        environ: Mapping[str, str],
        telemetry: Telemetry,
    ) -> None:
        self.task: Any = msgspec.json.decode(claim.task)
        self.episode_id = claim.episode_id
        self.temperature = claim.temperature
        self.context_tokens_max = claim.context_tokens_max
        self.key = claim.key
        self.base_url = claim.base_url
        self.session_url = claim.session_url
        self.environ = for_user_code(environ)
        self.result: Any = {}
        self.tool_s = 0.0
        self._tool_clock = ToolClock()
        self.virtual_s: float | None = None
        self.truncated_by: TruncationCause | UnsetType | None = UNSET
        self._gateway = gateway
        self._requests = requests
        self._telemetry = telemetry

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
        cuts: Sequence[ContextCut] = (),
        reply: Message | None = None,
    ) -> Completion:
        """Ask the model for the next message; retried on 429, 5xx and lost connections.

        Args:
            messages: In OpenAI's chat form.
            tools: Offered to the model.
            max_tokens: Of the answer; the gateway cuts it to the run's.
            cuts: What was done to the messages since the last request; it is recorded.
            reply: The next message, which the model reads in place of sampling one. Only in
                episodes of a supervised domain, and needed there.

        Raises:
            ContextFullError: the messages do not fit into the context window.
            EpisodeOverError: a later attempt replaced the episode, or its group is over.
            GatewayError: refused, or no answer in time.
        """
        fields: dict[str, object] = {"model": "policy", "messages": list(messages)}
        if tools:
            fields["tools"] = list(tools)
        if max_tokens is not None:
            fields["max_tokens"] = max_tokens
        if reply is not None:
            fields["forgemq_reply"] = reply
        told = json.dumps(msgspec.to_builtins(list(cuts))) if cuts else ""
        span_of_chat = self._telemetry.span("chat", episode=self.episode_id)
        with self._tool_clock.turn(), span_of_chat as span:
            # The gateway starts a trace for each completion and links it to this span.
            answer = await self._requests.send(
                "POST",
                f"{self.base_url}/chat/completions",
                key=self.key,
                fields=fields,
                headers={CONTEXT_HEADER: told} if told else {},
                trace=span.headers(),
                is_turn=True,
            )
            completion = read_completion(answer.body)
            span.set(completion=completion.completion_id)
        return completion

    def tool(self) -> AbstractContextManager[None]:
        """Run a tool inside this block: its time counts, as far as no completion was awaited.

        Tools that run at once count once, also those of sub-agents of this episode.
        """
        return self._tool_clock.tool()

    def turn(self) -> AbstractContextManager[None]:
        """Await a completion inside this block, if another client than `chat` asks for it.

        Its time is no tool time, also while a block of `tool` runs.
        """
        return self._tool_clock.turn()

    @property
    def all_tool_s(self) -> float:
        """`tool_s` and what the blocks of `tool` took, seconds."""
        return self.tool_s + self._tool_clock.total_s

    def truncate(self, cause: TruncationCause | None) -> None:
        """Note that a limit ends the episode; what it earns is `rewards.truncated`.

        The episode ends when `play` returns. None says that no limit ended it, even if its newest
        request was refused because the context is full.
        """
        self.truncated_by = cause

    async def report_reward(
        self, name: str, value: float, *, completion: Completion | None = None
    ) -> None:
        """Report a reward for one completion, or for the episode.

        The same name for the same completion counts once, with its first value.
        """
        completion_id = None if completion is None else completion.completion_id
        text = f"{self.episode_id}\0{name}\0{completion_id or ''}".encode()
        # The id follows from what is rewarded, so a repeated call is the same reward.
        reward = RewardRequest(
            reward_id=hashlib.blake2b(text, digest_size=16).hexdigest(),
            name=name,
            value=value,
            completion_id=completion_id,
        )
        await self._gateway.report_reward(self.episode_id, reward)
