"""Mathematics in a single turn: a row has `problem` and `answer`, the reply ends in a box."""

from forgemq_agents import Episode
from forgemq_graders import language_mixing, repetition, weighted

INSTRUCTION = "Reason step by step, and put your final answer within \\boxed{}."

habits = weighted((0.1, repetition(words=20)), (0.1, language_mixing))
"""Of all that was sampled, reasoning included; a right answer outweighs both."""


async def play(episode: Episode) -> None:
    """Ask once; a reply that its token limit cuts truncates the episode."""
    question = f"{episode.task['problem']}\n\n{INSTRUCTION}"
    reply = await episode.chat(messages=[{"role": "user", "content": question}])
    if reply.finish_reason == "length":
        episode.truncate("turn_too_long")
