"""Counts the tokens of the first prompt of each coding agent, in the demo's vocabulary.

Once `make test-clients` has installed the clients:

    PYTHONPATH=deploy/demo:loadtests python -m tests.clients.first_prompts
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from command_line.warm_start import BASE
from transformers import AutoTokenizer

from forgemq_rendering import Rendering
from tests.clients.bench import Client, keepalive_s, play
from tests.clients.systems import in_memory
from tests.clients.test_coding_agents import CLAUDE_CODE, CODEX
from tests.clients.test_scaffolds import AIDER, CLINE, MINI_SWE_AGENT, OPENCODE, QWEN_CODE

AGENTS = (MINI_SWE_AGENT, AIDER, CLINE, CODEX, QWEN_CODE, OPENCODE, CLAUDE_CODE)


async def first_prompt(client: Client) -> str:
    """The prompt of the client's first turn at its task; requests for a title are no turns."""
    with tempfile.TemporaryDirectory() as name:
        async with in_memory(Path(name), keepalive_s=keepalive_s("plain")) as system:
            outcome = await play(client, "plain", Path(name), system)
        rendering = Rendering.load(str(Path(name) / "model"))
        prompts = [rendering.decode(ids) for ids in outcome.prompts.values()]
    return next(prompt for prompt in prompts if client.is_step(prompt))


def main() -> int:
    """Print a line for each client."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    for client in AGENTS:
        text = asyncio.run(first_prompt(client))
        tokens = len(tokenizer.encode(text))
        sys.stdout.write(f"{client.name}: {len(text)} characters, {tokens} tokens\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
