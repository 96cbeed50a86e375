"""Finished conversations in a file of JSON lines: which lines are good, and what is sent of each.

A line is one conversation in the form of OpenAI's chat messages, with what it earned:

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
     "tools": [...], "reward": 1.0, "rewards": {"speed": 0.5}, "result": "4", "metadata": {...},
     "turns": [...]}

Only `messages` is needed. `turns` are the tokens of a played episode, as `forgemq export` has them.
"""

import hashlib
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from forgemq_contracts.admin import BODY_BYTES_MAX, FinishRequest, GroupRequest, RewardRequest
from forgemq_contracts.fields import REWARD_SIZE_MAX
from forgemq_contracts.recorded_turns import RecordedTurn
from forgemq_contracts.rules import ITEM_BYTES

LINE_BYTES_MAX = BODY_BYTES_MAX - 65_536
"""A conversation travels in one request for a group, whose other fields are below 1 kB; the rest
of the 64 kB is for text that is longer in JSON as it is written here than as it came."""
_TOO_LONG = f"has more than {LINE_BYTES_MAX} bytes, which is the most that a line may have"
RULE_CHARACTERS_MAX = 200
"""Of a rule that is broken: it quotes the value, which may be as long as the line."""
KEY_BYTES = 16
"""Two of a million conversations share a key of 128 bits with probability 1e-27."""

RewardValue: TypeAlias = Annotated[float, Meta(ge=-REWARD_SIZE_MAX, le=REWARD_SIZE_MAX)]


class ConversationError(Exception):
    """A line is no conversation; the text names the field and the rule."""


class _Part(Struct):
    """One part of a content that is a list: text, an image, audio or a file."""

    type: str


_Content: TypeAlias = str | tuple[_Part, ...]


class _Prompt(Struct):
    content: _Content


class _System(_Prompt, tag_field="role", tag="system"):
    pass


class _Developer(_Prompt, tag_field="role", tag="developer"):
    pass


class _User(_Prompt, tag_field="role", tag="user"):
    pass


class _Function(Struct):
    name: str
    arguments: Annotated[str, Meta(description="JSON as the model wrote it, well-formed or not.")]


class _Call(Struct):
    id: str
    type: Literal["function"]
    function: _Function


class _Assistant(Struct, tag_field="role", tag="assistant"):
    content: _Content | None = None
    refusal: str | None = None
    tool_calls: tuple[_Call, ...] = ()


class _Tool(Struct, tag_field="role", tag="tool"):
    content: _Content
    tool_call_id: str


_Message: TypeAlias = _System | _Developer | _User | _Assistant | _Tool


class _OfferedFunction(Struct):
    name: str


class _OfferedTool(Struct):
    type: Literal["function"]
    function: _OfferedFunction


class _Line(Struct, forbid_unknown_fields=True):
    messages: Annotated[tuple[_Message, ...], Meta(min_length=1)]
    tools: tuple[_OfferedTool, ...] = ()
    reward: RewardValue | None = None
    rewards: dict[Annotated[str, Meta(min_length=1, max_length=80)], RewardValue] = {}
    result: Any = None
    metadata: dict[str, Any] = {}
    turns: tuple[RecordedTurn, ...] = ()


class FinishedConversation(Struct, frozen=True, kw_only=True):
    """One good line: what the gateway is asked for it."""

    SENT: ClassVar[tuple[str, ...]] = ("messages", "tools", "metadata", "turns")
    """Fields of the line that are the task; the others have requests of their own."""

    key: Annotated[str, Meta(description="The same for the same values, in whatever order.")]
    task: msgspec.Raw
    whole: Annotated[msgspec.Raw, Meta(description="All fields of the line, to be trained.")]
    rewards: tuple[RewardRequest, ...]
    end: FinishRequest

    def group(self, domain: str, *, trains: bool = False) -> GroupRequest:
        """The request for its group; it trains only in a domain that is supervised."""
        return GroupRequest(
            domain=domain,
            idempotency_key=self.key,
            task=self.whole if trains else self.task,
            purpose="train" if trains else "eval",
            group_size=1,
            source="import",
        )


def conversation_of(line: bytes) -> FinishedConversation:
    """The conversation on this line.

    Raises:
        ConversationError: It breaks a rule; names the field and the rule.
    """
    if len(line) > LINE_BYTES_MAX:
        raise ConversationError(_TOO_LONG)
    try:
        line.decode()  # The decoder checks UTF-8 only in the texts that it builds.
        checked = msgspec.json.decode(line, type=_Line)
        fields = msgspec.json.decode(line)
        written = msgspec.json.encode(fields, order="sorted")
    except msgspec.ValidationError as error:
        raise ConversationError(_named(error)) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ConversationError(f"not one JSON object: {error}") from error
    _check_roles(checked.messages)
    _check_rewards(checked)
    _check_turns(checked.turns)
    if len(written) > LINE_BYTES_MAX:
        raise ConversationError(_TOO_LONG)
    task = {name: fields[name] for name in FinishedConversation.SENT if name in fields}
    return FinishedConversation(
        key="import/" + hashlib.blake2b(written, digest_size=KEY_BYTES).hexdigest(),
        task=msgspec.Raw(msgspec.json.encode(task)),
        whole=msgspec.Raw(written),
        rewards=_rewards(checked),
        end=FinishRequest(result=msgspec.Raw(msgspec.json.encode(checked.result))),
    )


def _named(error: msgspec.ValidationError) -> str:
    """The rule behind the path of the field, without the decoder's `$`."""
    rule, _, path = str(error).partition(" - at `$")
    if len(rule) > RULE_CHARACTERS_MAX:
        rule = rule[:RULE_CHARACTERS_MAX] + "..."
    field = path.rstrip("`").lstrip(".")
    return f"{field}: {rule}" if field else rule


def _check_roles(messages: tuple[_Message, ...]) -> None:
    calls: set[str] = set()
    for number, message in enumerate(messages):
        if isinstance(message, _Assistant):
            calls |= {call.id for call in message.tool_calls}
            if message.content is None and message.refusal is None and not message.tool_calls:
                raise ConversationError(
                    f"messages[{number}]: has no content, no refusal and no tool_calls"
                )
        elif isinstance(message, _Tool) and message.tool_call_id not in calls:
            raise ConversationError(
                f"messages[{number}].tool_call_id: no assistant message before it has a call "
                f"{message.tool_call_id[:80]!r}"
            )
    if not any(isinstance(message, _Assistant) for message in messages):
        raise ConversationError("messages: must have one of the assistant, as its answer")


def _check_rewards(line: _Line) -> None:
    if line.reward is not None and "outcome" in line.rewards:
        raise ConversationError("reward: is the outcome, which `rewards` names too")


def _check_turns(turns: tuple[RecordedTurn, ...]) -> None:
    lengths: dict[str, int] = {}
    for number, turn in enumerate(turns):
        field = f"turns[{number}]"
        if turn.completion_id in lengths:
            raise ConversationError(f"{field}.completion_id: a turn before it has the same one")
        if turn.parent_id is not None and turn.parent_id not in lengths:
            raise ConversationError(f"{field}.parent_id: no turn before it has this completion_id")
        shared = turn.shared_prefix_tokens
        if shared > (most := lengths.get(turn.parent_id or "", 0)):
            raise ConversationError(
                f"{field}.shared_prefix_tokens: {shared} are shared with a parent of {most} tokens"
            )
        own = len(turn.context_ids) + len(turn.output_ids)
        lengths[turn.completion_id] = shared + own // ITEM_BYTES


def _rewards(line: _Line) -> tuple[RewardRequest, ...]:
    outcome = {} if line.reward is None else {"outcome": line.reward}
    return tuple(
        RewardRequest(reward_id=f"import/{name}", name=name, value=value)
        for name, value in sorted((line.rewards | outcome).items())
    )
