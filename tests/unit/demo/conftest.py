"""A policy in token space: the gateway's rendering around a function from context to output."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from forgemq_agents.completion import Completion
from forgemq_agents.errors import ContextFullError
from forgemq_rendering import Rendering

MODEL = Path(__file__).parents[3] / "deploy" / "demo" / "model"
CONTEXT_TOKENS_MAX = 372
OUTPUT_TOKENS_MAX = 80

Sample = Callable[[list[int], int], Awaitable[list[int]]]


class TokenPolicy:
    """Keeps sampled ids as they are and renders only what is new, as the gateway does."""

    def __init__(self, rendering: Rendering, sample: Sample) -> None:
        self.rendering = rendering
        self.sample = sample
        self.context_tokens_max = CONTEXT_TOKENS_MAX
        self.contexts: list[list[int]] = []
        self.outputs: list[list[int]] = []
        self.completions: list[Completion] = []
        self.cuts: list[tuple] = []
        self.truncated_by: str | None = None
        self._messages: list[dict] = []

    def truncate(self, cause: str) -> None:
        self.truncated_by = cause

    async def chat(self, messages, *, tools=(), cuts=()) -> Completion:
        context = self._context(messages, tools)
        if len(context) >= self.context_tokens_max:
            raise ContextFullError("full", status=400, code="context_length_exceeded")
        room = min(OUTPUT_TOKENS_MAX, self.context_tokens_max - len(context))
        output = await self.sample(context, room)
        self.contexts.append(context)
        self.outputs.append(output)
        completion = self._completion(output, tools, len(context) + len(output))
        self._messages = [*messages, completion.message]
        self.completions.append(completion)
        self.cuts.append(tuple(cuts))
        return completion

    def _context(self, messages, tools) -> list[int]:
        known = len(self._messages)
        if known and messages[:known] == self._messages:
            added = self.rendering.extend(
                self.contexts[-1], self.outputs[-1], messages[known:], tools=tools
            )
            assert added is not None
            return [*self.contexts[-1], *self.outputs[-1], *added.ids]
        return self.rendering.render(messages, tools=tools).ids

    def _completion(self, output, tools, total_tokens) -> Completion:
        name = f"{len(self.outputs):032x}"
        parsed = self.rendering.parse(output, completion_id=name, tools=tools)
        message: dict = {"role": "assistant", "content": parsed.content or None}
        if parsed.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in parsed.tool_calls
            ]
        stopped = output[-1] in self.rendering.stop_token_ids
        return Completion(
            id=f"chatcmpl-{name}",
            message=message,
            finish_reason="stop" if stopped else "length",
            total_tokens=total_tokens,
        )


@pytest.fixture(scope="session")
def rendering() -> Rendering:
    return Rendering.load(str(MODEL))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
def scripted(rendering, tokenizer) -> Callable[..., TokenPolicy]:
    """A policy that writes these texts, one a turn; for None it writes until the token limit."""

    def make(*texts: str | None) -> TokenPolicy:
        left = iter(texts)
        stop = rendering.stop_token_ids[0]

        async def sample(context: list[int], room: int) -> list[int]:
            text = next(left)
            output = [9] * room if text is None else [*tokenizer.encode(text), stop]
            return output[:room]

        return TokenPolicy(rendering, sample)

    return make


@pytest.fixture(scope="session")
def token_policy() -> type[TokenPolicy]:
    return TokenPolicy


@pytest.fixture(scope="session")
def base_model():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    model = transformers.Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return model.eval()
