"""Extends a sampled turn under an opaque chat template, without re-rendering what was sampled.

`renderers` can do this only for the model families it knows. For any other template, a stand-in
conversation (one user message, one assistant message) is rendered alone and with the new messages
behind it. If the longer text starts with the shorter one, the difference is what the template puts
after an assistant message, whatever came before. If it does not, the template rewrites earlier
messages and there is no extension: the caller renders everything.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from forgemq_rendering.chat_template import RenderText
from forgemq_rendering.tokenizer import FolderTokenizer

# No template treats this text specially and no tokenizer sees it: only its position matters.
_STAND_IN = "stand-in-for-the-sampled-turn"
_QUESTION: Mapping[str, Any] = {"role": "user", "content": "stand-in-for-the-conversation"}
_TURN: Mapping[str, Any] = {"role": "assistant", "content": _STAND_IN}


class TemplateExtension:
    """Finds the tokens that the template puts after a sampled assistant message.

    Args:
        tokenizer: Has the template.
        stop_token_ids: An output that ends with one of them closed its message.
    """

    def __init__(self, tokenizer: FolderTokenizer, *, stop_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._stand_in = self._rendered_stand_in()
        self._close = self._turn_close(self._stand_in)

    def _rendered_stand_in(self) -> str:
        """The stand-in conversation without tools and calls; "" if the template refuses it."""
        render_text = self._tokenizer.render_text
        if render_text is None:
            return ""
        try:
            return render_text([_QUESTION, _TURN])
        except TemplateError:
            return ""

    def _turn_close(self, text: str) -> tuple[str, str] | None:
        """(stop token, text behind it) that end an assistant message; None if none is found."""
        close = text.partition(_STAND_IN)[2]
        for token_id in self._stop_token_ids:
            stop = self._tokenizer.decode([token_id], skip_special_tokens=False)
            if stop and close.startswith(stop):
                return stop, close[len(stop) :]
        return None

    def after(
        self,
        output: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> list[int] | None:
        """Tokens from the end of `output` up to the first token of the next assistant message.

        An output that was cut before its stop token is closed first. None if the template has no
        extension.
        """
        render_text = self._tokenizer.render_text
        if self._close is None or render_text is None:
            return None
        text = self._difference(render_text, messages, tools)
        if text is None:
            return None
        stop, behind_stop = self._close
        is_closed = bool(output) and output[-1] in self._stop_token_ids
        return self._tokenizer.encode(("" if is_closed else stop) + behind_stop + text)

    def _difference(
        self,
        render_text: RenderText,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str | None:
        turn = dict(_TURN)
        answered = [message for message in messages if message["role"] == "tool"]
        if answered:
            turn["tool_calls"] = [_stand_in_call(message) for message in answered]
        # One tool suffices to see whether the template moves the tools' text along with the
        # conversation; all of them would only make both texts longer.
        shown = list(tools)[:1] if tools else None
        before = [_QUESTION, turn]
        is_known = not answered and not shown
        try:
            shorter = self._stand_in if is_known else render_text(before, tools=shown)
            longer = render_text([*before, *messages], tools=shown, add_generation_prompt=True)
        except TemplateError:
            return None
        return longer[len(shorter) :] if longer.startswith(shorter) else None


def _stand_in_call(message: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": message.get("tool_call_id", ""),
        "type": "function",
        "function": {"name": message.get("name") or "tool", "arguments": {}},
    }
