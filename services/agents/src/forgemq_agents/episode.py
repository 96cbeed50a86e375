"""`Episode`: what a user's `async def play(episode)` gets."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from forgemq_agents.completion import Completion, Message, Tool, read_completion
from forgemq_agents.gateway import Claim, Gateway
from forgemq_agents.requests import JsonRequests
from forgemq_settings.user_code import for_user_code
from forgemq_telemetry.telemetry import Telemetry


class Episode:
    """One rollout of one task: the model's door, and what the agent says at the end.

    Any OpenAI or Anthropic client may be used instead of `chat`: point it at `base_url` with `key`
    or at `session_url`. Whatever `play` raises masks the episode; it is never a reward of zero.

    Attributes:
        task: As the task source made it.
        episode_id: `<group>.<index>.<attempt>`.
        temperature: Pinned by the gateway, whatever a request says; None: as the run says.
        key: API key; it names the episode and opens nothing else.
        base_url: OpenAI base URL for that key.
        session_url: The same with the key in its path, for clients whose key cannot be set.
        environ: Environment of the agents process without our own variables, which hold the admin
            key; for launchers of other programs.
        result: Reported at the end; any JSON value. Graders see it as `episode.result`.
        tool_s: Seconds spent in tools; add to it.
        virtual_s: The environment's own clock, where it has one.
    """

    def __init__(
        self,
        claim: Claim,
        *,
        gateway: Gateway,
        requests: JsonRequests,
        environ: Mapping[str, str],
        telemetry: Telemetry,
    ) -> None:
        self.task: Any = claim.task
        self.episode_id = claim.episode_id
        self.temperature = claim.temperature
        self.key = claim.key
        self.base_url = claim.base_url
        self.session_url = claim.session_url
        self.environ = for_user_code(environ)
        self.result: Any = {}
        self.tool_s = 0.0
        self.virtual_s: float | None = None
        self._gateway = gateway
        self._requests = requests
        self._telemetry = telemetry

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
    ) -> Completion:
        """The policy's next message; retried on 429, 5xx and lost connections.

        Raises:
            ContextFullError: the messages do not fit into the context window.
            EpisodeOverError: the episode is no longer ours.
            GatewayError: refused, or no answer in time.
        """
        fields: dict[str, object] = {"model": "policy", "messages": list(messages)}
        if tools:
            fields["tools"] = list(tools)
        if max_tokens is not None:
            fields["max_tokens"] = max_tokens
        with self._telemetry.span("chat", episode=self.episode_id) as span:
            # The completion's trace is the gateway's to name; it links this one.
            reply = await self._requests.send(
                "POST",
                f"{self.base_url}/chat/completions",
                key=self.key,
                fields=fields,
                trace=span.headers(),
            )
            completion = read_completion(reply.body)
            span.set(completion=completion.completion_id)
        return completion

    async def report_reward(
        self, name: str, value: float, *, completion: Completion | None = None
    ) -> None:
        """Report a reward for one completion, or for the episode.

        The same name for the same completion counts once, with its first value.
        """
        completion_id = None if completion is None else completion.completion_id
        text = f"{self.episode_id}\0{name}\0{completion_id or ''}".encode()
        await self._gateway.report_reward(
            self.episode_id,
            reward_id=hashlib.blake2b(text, digest_size=16).hexdigest(),
            name=name,
            value=value,
            completion_id=completion_id,
        )
