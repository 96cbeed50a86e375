"""How a run's engines guess tokens ahead of the policy, and how the guesses are trained."""

from typing import Annotated

from msgspec import Meta, Struct

from forgemq_contracts.completions import FinishedCompletion


class Speculation(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A draft that guesses the policy's next tokens: a head or a small model, one of the two.

    A head is trained with the policy; a small model stays as it is. The engine samples exactly as
    without either; only how many tokens a pass yields differs.
    """

    head: Annotated[
        str,
        Meta(
            description="Folder of the head the run starts with: config.json names the class "
            "`LlamaForCausalLMEagle`; embedding and language-model head are the policy's. The "
            "settings after `steps` are of its training.",
        ),
    ] = ""
    model: Annotated[
        str, Meta(description="Folder of a small model with the policy's vocabulary.")
    ] = ""
    steps: Annotated[
        int, Meta(ge=1, le=16, description="Tokens drafted before each pass of the policy.")
    ] = 3
    learning_rate: Annotated[float, Meta(gt=0)] = 1e-3
    loss_weight: Annotated[
        float,
        Meta(gt=0, description="Of the head's loss; the policy's gradient has no part in it."),
    ] = 1.0
    top_k: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="The policy's most likely tokens that the loss compares; all others are "
            "one more.",
        ),
    ] = 64
    push_every_steps: Annotated[
        int, Meta(ge=1, description="The head is published with every so many versions.")
    ] = 1


def trained_head(speculation: Speculation | None) -> Speculation | None:
    """That of a run which trains and publishes a draft head; None of any other run.

    A run without speculation trains none, nor does one in which a small model guesses.
    """
    return speculation if speculation is not None and speculation.head else None


def unpublished_head(speculation: Speculation | None, *, steps: int) -> str:
    """The warning that a run of so many steps publishes no head of its own; "" if it does."""
    trained = trained_head(speculation)
    if trained is None or trained.push_every_steps <= steps:
        return ""
    return (
        f"speculation.push_every_steps is {trained.push_every_steps}, above trainer.steps, "
        f"which is {steps}: the head is trained, and engines draft with the one they start with "
        "until the trainer is started again; lower it for engines to get the trained one"
    )


def verified_tokens(record: FinishedCompletion) -> int:
    """Output tokens that passes over drafted ones gave.

    Over `verifications` that is the acceptance length. Each prefill gives one token
    without a draft, and a retracted request is prefilled again.
    """
    if not record.verifications:
        return 0
    return max(0, len(record.output) // 4 - 1 - record.retractions)
