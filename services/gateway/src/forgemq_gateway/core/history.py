"""One episode's completions: a tree of message paths over a tree of tokens.

A request extends a completion if its messages start with the path that ends in it: the completion's
tokens are then kept as they were sampled. Any other request is rendered from its start and forks:
its parent is the completion it shares most leading tokens with, so the log still carries deltas.
"""

from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct

from forgemq_contracts.completions import TopTokens
from forgemq_gateway.core.completion_tokens import common_tokens, tokens_of
from forgemq_gateway.core.conversation import logged_messages, reply_message
from forgemq_gateway.core.held_bytes import HeldBytes, HeldPart
from forgemq_gateway.core.known_completion import NO_OFFSET, TOKEN_BYTES, KnownCompletion
from forgemq_gateway.core.message_paths import Branch, MessagePaths
from forgemq_gateway.core.prompt_paths import Continued, PromptPaths, is_prompt_key
from forgemq_gateway.core.raw_prompts import Prompt, TextPrompt, TokenPrompt
from forgemq_gateway.core.read_bodies import ReadBodies
from forgemq_gateway.core.replies import Reply, echo_digests, echo_key
from forgemq_gateway.core.requests import Echo, KeyedMessages

# About what the Python objects of one completion take beside its tokens and text.
_OBJECT_BYTES = 1024

# Renderers look back to the start of the assistant's message; these tokens reach it.
TAIL_TOKENS = 1024

_NO_ECHO = Echo()


class Match(Struct, frozen=True, kw_only=True):
    """The longest known path that a list of messages starts with.

    Attributes:
        completion: The completion at its end.
        consumed: Number of leading messages that are known.
        path: Digest of the known path.
    """

    completion: KnownCompletion
    consumed: int
    path: bytes


class History:
    """Completions of one attempt at one episode, in the order of the log.

    Args:
        held: The total that its bytes count in.
    """

    def __init__(self, held: HeldBytes | None = None) -> None:
        self.completions: dict[str, KnownCompletion] = {}
        self.held = HeldPart(held or HeldBytes())
        self.newest_offset = NO_OFFSET
        self._roots: list[KnownCompletion] = []
        self._by_path: dict[bytes, list[KnownCompletion]] = {}
        self._turn_of_echo: dict[str, str] = {}
        self._tail: tuple[KnownCompletion | None, bytes] = (None, b"")
        self._echoes: set[str] = set()
        self.prompts = PromptPaths()
        self.bodies = ReadBodies(self.held)
        self.paths = MessagePaths(self.held)

    def keys(self, digests: Sequence[str]) -> tuple[str, ...]:
        """Match keys of messages: their digests, but an echoed reply with calls is that reply.

        Such an echo has the reply's calls, arguments compared as JSON, and its text or none.
        """
        known = self._turn_of_echo
        return tuple([known.get(digest, digest) for digest in digests] if known else digests)

    def match(
        self, keys: Sequence[str], echo: Callable[[int], Echo] = lambda _: _NO_ECHO
    ) -> Match | None:
        """The deepest completion on this path, if any; cost O(known messages).

        Args:
            keys: Match key of each message.
            echo: Of the message at an index: it decides between replies with the same text.
        """
        paths = self.paths.known(keys)
        # From the deepest on, until a reply is alone on its path: which one of several is meant,
        # the one before it decides.
        levels: list[tuple[int, list[KnownCompletion]]] = []
        for index in reversed(range(len(paths))):
            found = self._by_path.get(paths[index])
            if found is not None:
                levels.append((index, found))
                if len(found) == 1:
                    break
        best: KnownCompletion | None = None
        for index, found in reversed(levels):
            is_alone = len(found) == 1
            best = found[0] if is_alone else _twin(found, partial(echo, index), before=best)
        if best is None:
            return None
        deepest = levels[0][0]
        return Match(completion=best, consumed=deepest + 1, path=paths[deepest])

    def note(self, branch: Branch) -> bytes:
        """Note the messages of a request; returns the path to the last one."""
        for key in filter(is_prompt_key, branch.keys):
            self.prompts.note(key)
        return self.paths.note(branch)

    def forget(self, branch: Branch) -> None:
        """Take back what a request noted that no lane has had."""
        for key in filter(is_prompt_key, self.paths.forget(branch)):
            self.prompts.forget(key)

    def is_echo(self, key: str) -> bool:
        """Whether a message with this key is one of the policy's replies."""
        return key in self._echoes

    def add(self, completion: KnownCompletion, *, keys: Sequence[str], after: bytes) -> None:
        """Add a finished completion and set its `path`.

        Args:
            completion: Its parent, if any, is here already.
            keys: Match keys of the request's messages behind `after`.
            after: Path digest that those messages follow.
        """
        echo = echo_key(completion.reply, request_id=completion.request_id)
        completion.path = self.paths.follow(self.note(Branch(keys, after)), echo)
        self.completions[completion.request_id] = completion
        self.newest_offset = max(self.newest_offset, completion.offset)
        self._by_path.setdefault(completion.path, []).append(completion)
        self._echoes.add(echo)
        if keys and is_prompt_key(keys[0]):
            self.prompts.add(completion, key=keys[0])
        for digest in echo_digests(completion.reply):
            self._turn_of_echo[digest] = echo
        siblings = self._roots if completion.parent is None else completion.parent.children
        siblings.append(completion)
        self.held.grow(
            len(completion.context)
            + len(completion.output)
            + len(completion.logprobs)
            + 2 * len(completion.messages)  # Also as they are read.
            + _size(completion.top_tokens)
            + completion.reply.characters
            + _OBJECT_BYTES
        )

    def context_tail(self, completion: KnownCompletion) -> bytes:
        """The last tokens of the context that a completion was sampled from.

        Asked of the newest one when its reply is read, and again when it is extended.
        """
        known, tail = self._tail
        if known is not completion:
            tail = self._new_tail(completion)
            self._tail = completion, tail
        return tail

    def _new_tail(self, completion: KnownCompletion) -> bytes:
        parent, (known, tail) = completion.parent, self._tail
        # Else the last tokens may be those of many short turns, and all of them are visited.
        if parent and parent is known and completion.shared_tokens == parent.total_tokens:
            return (tail + parent.output + completion.context)[-TAIL_TOKENS * TOKEN_BYTES :]
        count = completion.context_tokens
        return tokens_of(completion, count=count, skip=count - TAIL_TOKENS)

    def tail_before(self, shared_tokens: int, *, parent: KnownCompletion | None) -> bytes:
        """The last tokens of a context that ends within a completion, or with it."""
        if parent is None:
            return b""
        if shared_tokens == parent.total_tokens:
            return (self.context_tail(parent) + parent.output)[-TAIL_TOKENS * TOKEN_BYTES :]
        return tokens_of(parent, count=shared_tokens, skip=shared_tokens - TAIL_TOKENS)

    def reply_to(self, request_id: str) -> Reply | None:
        """The reply to this request; implements `conversation.Conversation`."""
        completion = self.completions.get(request_id)
        return None if completion is None else completion.reply

    def messages_until(self, request_id: str) -> KeyedMessages | None:
        """All messages up to the reply to this request, and it; None if they are not kept."""
        chain: list[KnownCompletion] = []
        node = self.completions.get(request_id)
        while node is not None:
            chain.append(node)
            node = None if node.is_fork else node.parent
        if not chain or not all(completion.messages for completion in chain):
            return None
        return KeyedMessages.joined([_exchange(completion) for completion in reversed(chain)])

    def continued(self, prompt: Prompt) -> Continued | None:
        """The completion that this prompt continues, if any."""
        if isinstance(prompt, TextPrompt):
            return self.prompts.continued(prompt)
        return self._continued(prompt)

    def _continued(self, prompt: TokenPrompt) -> Continued | None:
        """As `continued`: the prompt may leave out what ended the completion."""
        completion, shared = self.nearest(prompt.tokens)
        if completion is None:
            return None
        has_end = completion.sampled_end == "stop"
        needed = completion.total_tokens - has_end
        if completion.stop_string:
            needed = completion.context_tokens + 1
        is_continued = shared >= needed and shared > completion.context_tokens
        return Continued(completion, "") if is_continued else None

    def nearest(self, tokens: bytes) -> tuple[KnownCompletion | None, int]:
        """The completion that shares most leading tokens with these, and how many.

        Descends only to children that leave their parent exactly where these tokens do, so the
        cost is O(tokens + completions looked at).
        """
        best: KnownCompletion | None = None
        shared = 0
        level, prefix = self._roots, 0
        while level:
            ahead: KnownCompletion | None = None
            rest = tokens[prefix * TOKEN_BYTES :]
            for node in level:
                if node.shared_tokens != prefix:
                    continue
                length = prefix + common_tokens(node.context + node.output, rest)
                if length > shared:
                    best, shared, ahead = node, length, node
            if ahead is None:
                break
            level, prefix = ahead.children, shared
        return best, shared


def _size(top_tokens: TopTokens | None) -> int:
    return 0 if top_tokens is None else len(top_tokens.ids) + len(top_tokens.logprobs)


def _exchange(completion: KnownCompletion) -> KeyedMessages:
    """The messages that a request added, and its reply: read once, as every later turn has them."""
    exchange = completion.exchange
    if exchange is None:
        reply = reply_message(completion.reply, request_id=completion.request_id)
        exchange = KeyedMessages.of([*logged_messages(completion.messages), reply])
        completion.exchange = exchange
    return exchange


def _twin(
    found: Sequence[KnownCompletion], echo: Callable[[], Echo], *, before: KnownCompletion | None
) -> KnownCompletion:
    """The one of several replies with the same path: by its reasoning, its parent, or the last.

    An echo that names the request it answered is that reply, whatever its reasoning says.
    """
    said = echo()

    def likeness(completion: KnownCompletion) -> tuple[bool, bool, bool, int]:
        is_named = completion.request_id == said.answered_id
        has_thought = bool(said.thought) and completion.reply.thinking.strip() == said.thought
        return is_named, has_thought, completion.parent is before, completion.offset

    return max(found, key=likeness)
