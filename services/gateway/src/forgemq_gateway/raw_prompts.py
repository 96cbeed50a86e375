"""The tokens of prompts that have no chat template: texts and token ids."""

from bisect import bisect_left
from collections.abc import Sequence

from forgemq_contracts.arrays import pack_ids, unpack_ids
from forgemq_gateway.core.errors import invalid, surely_overflows
from forgemq_gateway.core.history import History
from forgemq_gateway.core.known_completion import TOKEN_BYTES
from forgemq_gateway.core.placed import Placed
from forgemq_gateway.core.plans import Plan
from forgemq_gateway.core.raw_prompts import TextPrompt, TokenPrompt
from forgemq_gateway.large_work import LargeWork
from forgemq_rendering import Rendering


class RawPrompts:
    """Makes prompts into tokens.

    Args:
        rendering: Of the run's model.
        work: Where long texts are tokenised.
        context_tokens_max: A longer prompt is refused.
    """

    def __init__(self, rendering: Rendering, *, work: LargeWork, context_tokens_max: int) -> None:
        self._rendering = rendering
        self._work = work
        self._context_tokens_max = context_tokens_max

    async def place(self, planned: Plan, *, history: History) -> Placed:
        """The tokens of a plan's one prompt.

        Raises:
            RefusedError: 400: it is empty, or cannot fit, or a token id is unknown.
        """
        (prompt,) = planned.request.prompts
        if isinstance(prompt, TextPrompt) and planned.match is not None:
            placed = await self._continue(planned)
        else:
            tokens = await self._tokens(prompt)
            parent, shared = history.nearest(tokens)
            placed = Placed(
                parent=parent,
                shared_tokens=shared,
                context=tokens[shared * TOKEN_BYTES :],
                fork_reason=planned.fork_reason,
            )
        if not placed.context_tokens:
            raise invalid("the prompt must have at least one token", param="prompt")
        return placed

    async def _tokens(self, prompt: TextPrompt | TokenPrompt) -> bytes:
        if isinstance(prompt, TokenPrompt):
            self._check_ids(prompt.tokens)
            return prompt.tokens
        text = prompt.text
        return await self._work.run(lambda: self._encoded(text, is_start=True), size=len(text))

    async def _continue(self, planned: Plan) -> Placed:
        """Keep the completion's context and what the text has of its output, to the token."""
        assert planned.match is not None
        completion, behind = planned.match.completion, planned.behind

        def added() -> tuple[int, bytes]:
            sampled = unpack_ids(completion.output)
            kept = self._kept(sampled, behind)
            rest = behind[len(self._rendering.decode(sampled[:kept])) :]
            return kept, self._encoded(rest, is_start=False)

        kept, tokens = await self._work.run(added, size=len(behind))
        return Placed(
            parent=completion,
            shared_tokens=completion.context_tokens + kept,
            context=tokens,
            fork_reason=None,
        )

    def _kept(self, sampled: Sequence[int], text: str) -> int:
        """How many of the sampled tokens the text begins with.

        The last ones may be missing: the token or the string that ended the output.
        """

        def is_beyond(count: int) -> bool:
            # A character whose bytes are not complete yet shows as replacement characters.
            return not text.startswith(self._rendering.decode(sampled[:count]).rstrip("\ufffd"))

        count = bisect_left(range(1, len(sampled) + 1), True, key=is_beyond)
        while not text.startswith(self._rendering.decode(sampled[:count])):
            count -= 1
        return count

    def _encoded(self, text: str, *, is_start: bool) -> bytes:
        tokens_min = self._rendering.tokens_min([text])
        if tokens_min > self._context_tokens_max:
            raise surely_overflows(
                tokens_min=tokens_min, context_tokens_max=self._context_tokens_max
            )
        return pack_ids(self._rendering.encode(text, is_start=is_start))

    def _check_ids(self, tokens: bytes) -> None:
        size = self._rendering.vocabulary_size
        largest = max(unpack_ids(tokens), default=0)
        if largest >= size:
            raise invalid(f"token id {largest} is not below {size}", param="prompt")
