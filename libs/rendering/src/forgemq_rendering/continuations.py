"""How an output may go on in ways that change how its beginning is read.

What `Rendering.parse` gives of an output is settled as far as they give the same
with each continuation behind it. So the parser itself says what may leave before the output ends.
"""

from msgspec import Struct

from forgemq_rendering.tokenizer import FolderTokenizer

_THINK = ("<think>", "</think>")
_CALL = ("<tool_call>", "</tool_call>")
_HEAD = "<|im_start|>assistant\n"
_WHOLE_CALL = '<tool_call>\n{"name": "z", "arguments": {}}\n</tool_call>'


class Continuations(Struct, frozen=True, kw_only=True):
    """Tokens that may follow an output.

    Attributes:
        plain: For outputs without a template: nothing, and a text.
        parsed: These, each mark of reasoning and calls with a text behind it, closed reasoning and
            a whole call. () for a model whose calls are not known.
        call_id: The mark that begins a call. Whether it becomes a call or stays text is open until
            the output ends, and so is all behind it.
        head: Of a turn. An output that begins with it is read without it, so that nothing of one
            that begins with a part of it is settled.
        written_marks: Marks that the parser finds in text, also if the model writes them as several
            tokens: text that may be the beginning of one is not settled.
    """

    plain: tuple[tuple[int, ...], ...]
    parsed: tuple[tuple[int, ...], ...] = ()
    call_id: int = -1
    head: tuple[int, ...] = ()
    written_marks: tuple[str, ...] = ()


def continuations(
    tokenizer: FolderTokenizer, *, has_known_calls: bool, is_opaque: bool
) -> Continuations:
    """Those of a model.

    Args:
        tokenizer: Of the model.
        has_known_calls: Its calls are JSON between `<tool_call>` marks.
        is_opaque: The text of its control tokens is taken out of what it says.
    """
    text = tuple(tokenizer.encode("z"))
    plain = ((), text)
    if not has_known_calls:
        return Continuations(plain=plain)
    ids = {mark: tuple(tokenizer.encode(mark)) for mark in (*_THINK, *_CALL)}
    begin, end = (ids[mark] for mark in _THINK)
    call = tokenizer.encode(_WHOLE_CALL)
    marked = tuple((*mark, *text) for mark in ids.values())
    return Continuations(
        plain=plain,
        parsed=(*plain, *marked, (*begin, *text, *end, *text), tuple(call)),
        call_id=ids[_CALL[0]][0],
        head=tuple(tokenizer.encode(_HEAD)),
        written_marks=(
            *(mark for mark in _THINK if len(ids[mark]) > 1),
            *(tokenizer.all_special_tokens if is_opaque else ()),
        ),
    )
