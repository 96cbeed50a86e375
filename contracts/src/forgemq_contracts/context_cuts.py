"""How an agent says that it changed its context before a request, and how that is recorded.

An agent that manages its context sends the cuts since its last request as a JSON array of
`ContextCut` in the header CONTEXT_HEADER of the next one. Servers that do not know it ignore it.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from forgemq_contracts.fields import CompletionId

CONTEXT_HEADER = "x-forgemq-context"
CONTEXT_HEADER_BYTES_MAX = 16 * 1024
"""Many times what a few cuts take; a text that was kept is in the messages and not here."""

CUTS_MAX = 16
"""Before one request."""


CutForm: TypeAlias = Annotated[
    Literal["tool", "rule"],
    Meta(
        description="tool: the policy called for it. rule: the agent decided, at a size of the "
        "context."
    ),
]


class ContextCut(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One application of a context function: s' = f(s, a, o), arXiv 2605.26494, section 6.

    s' is the messages of the request that has the cut. What the function keeps in words is in
    them, and was sampled by `after_id`.
    """

    function: Annotated[
        str,
        Meta(min_length=1, max_length=80, description="Name of the function that was applied."),
    ]
    form: CutForm
    after_id: Annotated[
        CompletionId | None,
        Meta(description="The newest completion of the context that was cut; None if unknown."),
    ] = None
    is_written: Annotated[
        bool, Meta(description="That completion has text that the function kept.")
    ] = False
    parameters: Annotated[
        dict[str, bool | int | float | str],
        Meta(max_length=16, description="As the function was called, beside messages and text."),
    ] = {}
