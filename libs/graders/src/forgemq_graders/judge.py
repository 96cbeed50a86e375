r"""A judge model: an outcome that asks any server with OpenAI's chat completions.

    import os
    from forgemq_graders import Judge, judged

    outcome = judged(
        Judge(url="https://judge.example/v1", model="judge-1", api_key=os.environ["JUDGE_KEY"]),
        prompt="Question: {task[question]}\nAnswer: {answer}\nEnd with 'Score: ' and 0 to 10.",
        scale=10.0,
    )

What the judge cannot do, it does not score: a failure raises, which masks the episode.
"""

import asyncio
import hashlib
import math
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

import aiohttp
import msgspec
from msgspec import Meta, Struct

from forgemq_contracts.grading import GradingEpisode
from forgemq_graders.answers import AsyncOutcome, answer_text, plain
from forgemq_graders.process import AsyncProcessReward
from forgemq_graders.replies import Replies, RepliesInMemory, RepliesOnDisk

_Messages: TypeAlias = Sequence[Mapping[str, Any]]
Prompt: TypeAlias = str | Callable[[GradingEpisode], _Messages]
TurnPrompt: TypeAlias = str | Callable[[GradingEpisode, int], _Messages]
_REPLY_BYTES_MAX = 2**20
_ERROR_CHARACTERS_MAX = 300
_RETRIED = frozenset({408, 409, 425, 429, *range(500, 600)})
# The scale may stand in brackets behind the word: "Score (0-10): 7". A number alone is no scale.
_SCORE = re.compile(
    r"score(?:\s?[(\[](?!\s*-?[\d.]+\s*[)\]])[^()\[\]\n]{1,40}[)\]])?\W{0,8}?(-?\d+(?:\.\d+)?)",
    re.IGNORECASE,
)


class JudgeError(Exception):
    """The judge gave no score; the message has its last failure."""


class _AgainError(Exception):
    """A failure that another try may not have."""


class Judge(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the judge is, and how it is asked.

    Attributes:
        url: Base URL up to and with `/v1`: of a provider, or of an engine that serves a lane.
        model: As the server names it.
        sampling: Further fields of the request, `temperature` 0 if it is not among them.
        api_key: Sent as a bearer token; "" sends none.
        cache: File of replies, shared by all processes of the machine; None: in memory.
    """

    url: Annotated[str, Meta(pattern=r"^https?://")]
    model: Annotated[str, Meta(min_length=1)]
    sampling: Mapping[str, Any] = MappingProxyType({})
    api_key: str = ""
    cache: str | None = None
    cached_max: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000
    at_once: Annotated[int, Meta(ge=1, le=4096, description="In each grader process.")] = 16
    tries_max: Annotated[int, Meta(ge=1, le=20)] = 5
    timeout_s: Annotated[float, Meta(gt=0, le=3600, description="Of one try.")] = 60.0
    wait_s: Annotated[
        float, Meta(ge=0, description="Before the second try; twice as long before each next one.")
    ] = 0.5
    wait_max_s: Annotated[float, Meta(ge=0)] = 30.0


class _Choice(Struct, frozen=True):
    message: dict[str, Any]


class _Reply(Struct, frozen=True):
    choices: tuple[_Choice, ...]


def judged(
    judge: Judge,
    *,
    prompt: Prompt,
    score: Callable[[str], float] | None = None,
    scale: float = 1.0,
) -> AsyncOutcome:
    """An outcome: the score that the judge gives, divided by `scale`.

    Args:
        judge: Whom to ask.
        prompt: A template for `str.format` with `answer` (the last completion's content), `task`
            and `result`; or a function of the episode that returns messages.
        score: The score in a reply; raises ValueError if it has none, and the judge is asked again.
            By default the last number behind the word "score", from 0 to `scale`; between them
            the scale may stand in brackets.
        scale: Of the scores.

    Raises:
        msgspec.ValidationError: a field of `judge` is out of bounds.
        ValueError: `scale` is not above 0.
    """
    share = _share(judge, score, scale)

    async def outcome(episode: GradingEpisode) -> float:
        return await share(_messages(prompt, episode))

    return outcome


def judged_turns(
    judge: Judge,
    *,
    prompt: TurnPrompt,
    score: Callable[[str], float] | None = None,
    scale: float = 1.0,
) -> AsyncProcessReward:
    """A process reward: what the judge says of each completion, divided by `scale`.

    If it gives no score to one of them it raises, which masks the episode.

    Args:
        judge: Whom to ask.
        prompt: A template for `str.format` with `turn` (the completion's text, calls included),
            `number` (from 1), `task` and `result`; or a function of the episode and the index of
            a completion that returns messages.
        score: As in `judged`.
        scale: Of the scores.

    Raises:
        msgspec.ValidationError: a field of `judge` is out of bounds.
        ValueError: `scale` is not above 0.
    """
    share = _share(judge, score, scale)

    async def reward(episode: GradingEpisode) -> Sequence[float]:
        numbers = range(len(episode.completions))
        questions = [_turn_messages(prompt, episode, number) for number in numbers]
        asking = [asyncio.ensure_future(share(each)) for each in questions]
        try:
            return await asyncio.gather(*asking)
        finally:
            for each in asking:  # One that failed leaves no use for the others.
                each.cancel()

    return reward


def _share(
    judge: Judge, score: Callable[[str], float] | None, scale: float
) -> Callable[[_Messages], Coroutine[Any, Any, float]]:
    """Asks the judge, and divides its score by `scale`; raises as `judged`."""
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")
    asked = _Asked(msgspec.convert(msgspec.structs.asdict(judge), Judge))
    parse = score or (lambda reply: last_score(reply, maximum=scale))

    async def share(messages: _Messages) -> float:
        return await asked.score(messages, parse) / scale

    return share


def last_score(reply: str, *, maximum: float) -> float:
    """The last number behind the word "score".

    Raises:
        ValueError: there is none, or it is not from 0 to `maximum`.
    """
    found = _SCORE.findall(reply)
    if not found:
        raise ValueError(f"no score in {reply[-_ERROR_CHARACTERS_MAX:]!r}")
    if not 0 <= (value := float(found[-1])) <= maximum:
        raise ValueError(f"a score must be from 0 to {maximum:g}, got {value:g}")
    return value


class _Asked:
    """One judge in one process: its cache, its places, the questions that are under way."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._replies: Replies = (
            RepliesOnDisk(Path(judge.cache), judge.cached_max)
            if judge.cache is not None
            else RepliesInMemory(judge.cached_max)
        )
        self._places = asyncio.Semaphore(judge.at_once)
        self._asking: dict[str, asyncio.Lock] = {}

    async def score(self, messages: _Messages, parse: Callable[[str], float]) -> float:
        """The score of the kept reply, or of a new one, which is kept if it has a score."""
        body = msgspec.json.encode(
            {
                "model": self._judge.model,
                "temperature": 0,
                **self._judge.sampling,
                "messages": messages,
            },
            order="sorted",
        )
        key = hashlib.sha256(body).hexdigest()
        # Equal questions wait for each other: the first one asks.
        lock = self._asking.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                kept = self._replies.get(key)
                if kept is not None:
                    with suppress(ValueError):  # Another function of the user found a score in it.
                        return float(parse(kept))
                async with self._places:
                    return await self._ask(key, body, parse)
        finally:
            if not lock.locked():
                self._asking.pop(key, None)

    async def _ask(self, key: str, body: bytes, parse: Callable[[str], float]) -> float:
        failure = ""
        for tried in range(self._judge.tries_max):
            if tried:
                await asyncio.sleep(_wait_s(self._judge, key, tried))
            try:
                reply = await self._reply(body)
                value = float(parse(reply))
            except (_AgainError, ValueError, TimeoutError, aiohttp.ClientError, OSError) as error:
                failure = f"{type(error).__name__.strip('_')}: {error}"
                continue
            if not math.isfinite(value):
                raise JudgeError(f"a score must be finite, got {value}")
            self._replies.put(key, reply)
            return value
        raise JudgeError(f"no score after {self._judge.tries_max} tries: {failure}")

    async def _reply(self, body: bytes) -> str:
        headers = {"Content-Type": "application/json"}
        if self._judge.api_key:
            headers["Authorization"] = f"Bearer {self._judge.api_key}"
        url = self._judge.url.rstrip("/") + "/chat/completions"
        timeout = aiohttp.ClientTimeout(total=self._judge.timeout_s)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url, data=body, headers=headers, allow_redirects=False) as response,
        ):
            payload = await _payload(response)
        return _content(response.status, payload)


def _messages(prompt: Prompt, episode: GradingEpisode) -> _Messages:
    if not isinstance(prompt, str):
        return prompt(episode)
    text = prompt.format(answer=answer_text(episode), task=episode.task, result=episode.result)
    return [{"role": "user", "content": text}]


def _turn_messages(prompt: TurnPrompt, episode: GradingEpisode, index: int) -> _Messages:
    if not isinstance(prompt, str):
        return prompt(episode, index)
    text = prompt.format(
        turn=plain(episode.completions[index].text),
        number=index + 1,
        task=episode.task,
        result=episode.result,
    )
    return [{"role": "user", "content": text}]


def _wait_s(judge: Judge, key: str, tried: int) -> float:
    """Twice as long each time, and up to half as long again, by the question: not all at once."""
    spread = int.from_bytes(hashlib.sha256(f"{key}{tried}".encode()).digest()[:4], "big") / 2**32
    return min(judge.wait_max_s, judge.wait_s * 2.0 ** (tried - 1)) * (1 + spread / 2)


async def _payload(response: aiohttp.ClientResponse) -> bytes:
    payload = b""
    async for chunk in response.content.iter_any():
        payload += chunk
        if len(payload) > _REPLY_BYTES_MAX:
            raise JudgeError(f"a reply must have at most {_REPLY_BYTES_MAX} bytes")
    return payload


def _content(status: int, payload: bytes) -> str:
    """The text of the reply.

    Raises:
        _AgainError: an error that may pass, or no reply of chat completions.
        JudgeError: the server refused the request.
    """
    said = payload[:_ERROR_CHARACTERS_MAX].decode(errors="replace")
    if status in _RETRIED:
        raise _AgainError(f"status {status}: {said}")
    if status != 200:
        raise JudgeError(f"status {status}: {said}")
    try:
        reply = msgspec.json.decode(payload, type=_Reply)
        content = reply.choices[0].message["content"]
    except (msgspec.DecodeError, LookupError) as error:
        raise _AgainError(f"no chat completion ({error}): {said}") from error
    if not isinstance(content, str):
        raise _AgainError(f"no text in the reply: {said}")
    return content
