"""An agent of a single turn: the task's question, and the answer."""

from forgemq_agents import Episode


async def play(episode: Episode) -> None:
    """Ask once; the rewards read the completion."""
    await episode.chat(messages=[{"role": "user", "content": episode.task["question"]}])
