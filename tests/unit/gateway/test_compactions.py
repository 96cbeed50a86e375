"""Coding agents that shorten their context by themselves: the fork is counted as a compaction.

The requests are those of Claude Code 2.1.197 (messages), codex 0.169.0 (responses) and opencode
1.18.33 (chat completions), seen with `/compact`, `model_auto_compact_token_limit` and a small
`limit.context`, with their long texts shortened.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.gateway.scripted_lane import Asked
from tests.unit.gateway.talk import Talk, talk

TASK = "Write hello into out.txt and show it."
SUMMARY = """1. Primary request: write hello into out.txt, and show what is in it.
2. Files: out.txt was written with the word hello by one command of the shell.
3. Pending: nothing is pending after the file was shown to the user."""
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
SUMMARISE = "summary of"


def answer(asked: Asked) -> str:
    """A summary if the newest message asks for it, else a call for the first two results."""
    newest = asked.text.rpartition("<|im_start|>user")[2]
    if SUMMARISE in newest:
        return f"<analysis>\nLet me think of it.\n</analysis>\n<summary>\n{SUMMARY}\n</summary>"
    return CALL if asked.text.count("<tool_response>") < 2 else "All done: it is written."


async def reasons(talking: Talk) -> list[str | None]:
    return [record.turn.fork_reason for record in await talking.finished()]


class Messages:
    """Claude Code: keeps its system prompt; the summary is in the first message of the user."""

    tools = ({"name": "bash", "input_schema": {"type": "object"}},)

    def __init__(self, talking: Talk) -> None:
        self.talking = talking

    async def ask(self, messages: Sequence[Any], *, system: str = "You are Claude.") -> Any:
        body = {
            "model": "m",
            "max_tokens": 150,
            "system": system,
            "messages": list(messages),
            "tools": list(self.tools),
        }
        reply = await self.talking.post("/v1/messages", body)
        assert reply.status_code == 200, reply.text
        return {"role": "assistant", "content": reply.json()["content"]}

    async def work(self) -> list[Any]:
        """Two calls and the answer."""
        messages: list[Any] = [{"role": "user", "content": f"<reminder/>{TASK}"}]
        for _ in range(2):
            messages.append(await self.ask(messages))
            (call,) = (each for each in messages[-1]["content"] if each["type"] == "tool_use")
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": "out.txt"}
            messages.append({"role": "user", "content": [result]})
        return [*messages, await self.ask(messages)]


def continued(summary: str) -> dict[str, Any]:
    told = "This session is being continued from a previous conversation that ran out of context."
    return {"role": "user", "content": f"<reminder/>{told}\n\nSummary:\n{summary}\nPick it up."}


NEXT = {"role": "user", "content": "List the folder."}


async def test_claude_codes_compaction_is_one_although_its_new_path_is_no_shorter(
    model: Path,
) -> None:
    async with talk(model, answer) as talking:
        agent = Messages(talking)
        messages = await agent.work()
        await agent.ask([*messages, {"role": "user", "content": f"Give a {SUMMARISE} it all."}])
        kept = [messages[-1], {"role": "user", "content": "/compact"}]
        no = {"role": "assistant", "content": "No response requested."}
        told = [continued(SUMMARY), *kept, no, NEXT, no, NEXT, no, NEXT]
        await agent.ask(told)
        ended = await talking.end()
        assert await reasons(talking) == [None, None, None, None, "compaction"]
    assert [(each.reason, each.count) for each in ended.fork_reasons] == [("compaction", 1)]


async def test_a_summary_that_the_agent_wrote_itself_is_a_compaction_if_turns_are_left_out(
    model: Path,
) -> None:
    async with talk(model, answer) as talking:
        agent = Messages(talking)
        messages = await agent.work()
        no = {"role": "assistant", "content": "No."}
        told = [continued("nobody said this"), messages[-1], NEXT, no, NEXT, no, NEXT]
        await agent.ask(told)
        assert (await reasons(talking))[-1] == "compaction"


async def test_an_agent_with_another_system_prompt_that_is_asked_about_an_answer_is_beside_it(
    model: Path,
) -> None:
    async with talk(model, answer) as talking:
        agent = Messages(talking)
        await agent.work()
        question = {"role": "user", "content": "Is this right? All done: it is written."}
        await agent.ask([question], system="You review.")
        assert (await reasons(talking))[-1] == "side_request"


async def test_a_changed_first_message_with_all_replies_behind_it_is_an_edit(model: Path) -> None:
    async with talk(model, answer) as talking:
        agent = Messages(talking)
        first, *rest = await agent.work()
        await agent.ask([{**first, "content": "changed"}, *rest, NEXT])
        assert (await reasons(talking))[-1] == "edited"


async def test_codexs_compaction_is_one(model: Path) -> None:
    """Its summary is a message of the user behind the task; the request for it has no tools."""
    tools = [{"type": "function", "name": "bash", "parameters": {"type": "object"}}]
    told = "Another language model started to solve this problem and produced a summary of its work"

    async def ask(talking: Talk, items: Sequence[Any], **fields: Any) -> list[Any]:
        body = {"model": "m", "instructions": "You are Codex.", "store": False, **fields}
        reply = await talking.post("/v1/responses", {**body, "input": list(items)})
        assert reply.status_code == 200, reply.text
        return list(reply.json()["output"])

    def by(role: str, text: str) -> Any:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    opening = [by("developer", "skills"), by("user", "<environment/>"), by("user", TASK)]
    async with talk(model, answer) as talking:
        output = await ask(talking, opening, tools=tools)
        call_id = next(each["call_id"] for each in output if each["type"] == "function_call")
        result = {"type": "function_call_output", "call_id": call_id, "output": "out.txt"}
        prompt = by("user", f"You are performing a CHECKPOINT: write a {SUMMARISE} it.")
        await ask(talking, [*opening, *output, result, prompt])
        await ask(talking, [*opening, by("user", f"{told}:\n{SUMMARY}")], tools=tools)
        found = await reasons(talking)
    assert found == [None, None, "compaction"]


async def test_opencodes_compaction_is_one_beside_the_request_that_wrote_it(model: Path) -> None:
    """Another agent writes the summary, which then is a reply to a question nobody had asked."""
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
    system = {"role": "system", "content": "You are opencode."}

    async def ask(talking: Talk, messages: Sequence[Any], **fields: Any) -> Any:
        body = {"model": "m", "messages": list(messages), **fields}
        reply = await talking.post("/v1/chat/completions", body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["message"]

    async with talk(model, answer) as talking:
        await ask(talking, [system, {"role": "user", "content": TASK}], tools=tools)
        summarise = {"role": "system", "content": "You are a context summarization agent."}
        whole = {"role": "user", "content": f"A {SUMMARISE} <conversation>{TASK}</conversation>"}
        summary = await ask(talking, [summarise, whole])
        asked = {"role": "user", "content": "What did we do so far?"}
        summary = {"role": "assistant", "content": summary["content"]}
        go_on = {"role": "user", "content": "Continue if you have next steps."}
        await ask(talking, [system, asked, summary, go_on], tools=tools)
        found = await reasons(talking)
    assert found == [None, "side_request", "compaction"]


@pytest.mark.parametrize("name", ["out.txt", "hello"])
async def test_a_short_word_of_an_answer_in_another_question_is_no_summary(
    model: Path, name: str
) -> None:
    async with talk(model, lambda _: name) as talking:
        await talking.post(
            "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "a"}]}
        )
        other = {"role": "user", "content": f"What is {name} for?"}
        await talking.post("/v1/chat/completions", {"model": "m", "messages": [other]})
        assert await reasons(talking) == [None, "side_request"]
