"""A request for several completions as several requests: one for each choice of its answer.

Each choice is a turn of its own: with its id, its record and its attempts. Those of one prompt have
one parent, and whichever the client echoes is extended.
"""

from msgspec.structs import replace

from forgemq_gateway.core.digests import digest_of
from forgemq_gateway.core.errors import invalid
from forgemq_gateway.core.raw_prompts import Prompt
from forgemq_gateway.core.requests import Request


def check_choices(request: Request, *, choices_max: int) -> None:
    """Return if the request asks for at most so many completions.

    Raises:
        RefusedError: 400: it asks for more.
    """
    if request.n > choices_max:
        raise invalid(f"n must be at most {choices_max}, got {request.n}", param="n")
    count = request.n * len(request.prompts)
    if count > choices_max:
        raise invalid(
            f"n times the number of prompts must be at most {choices_max}, got {count}",
            param="prompt",
        )


def choices_of(request: Request) -> tuple[Request, ...]:
    """One request for each choice, in their order; the first has the digest of the whole body."""
    if request.n == 1 and len(request.prompts) <= 1:
        return (request,)  # Nearly every request, and to copy one costs.
    prompts: list[tuple[Prompt, ...]] = [(prompt,) for prompt in request.prompts] or [()]
    asked = [prompt for prompt in prompts for _ in range(request.n)]
    return tuple(
        replace(
            request,
            n=1,
            prompts=prompt,
            body_digest=_choice_digest(request.body_digest, index),
            # Several choices are written one behind the other, as a whole.
            is_stream=request.is_stream and len(asked) == 1,
        )
        for index, prompt in enumerate(asked)
    )


def _choice_digest(body_digest: str, index: int) -> str:
    return digest_of(f"{body_digest}.{index}".encode()) if index else body_digest
