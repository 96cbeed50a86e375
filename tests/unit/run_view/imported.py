"""Records of imports and of live traffic, as the services write them."""

from forgemq_contracts.episodes import FinishedEpisode
from forgemq_contracts.fields import Source
from forgemq_contracts.groups import (
    AdmittedGroup,
    EpisodeScore,
    RequestedGroup,
    RetiredGroup,
    ScoredGroup,
)
from forgemq_contracts.messages import Message
from forgemq_contracts.topics import (
    ADMITTED_GROUPS,
    FINISHED_EPISODES,
    REQUESTED_GROUPS,
    RETIRED_GROUPS,
    SCORED_GROUPS,
)
from tests.unit.run_view.synthetic import DOMAIN, SyntheticRun

TASK = (
    b'{"messages":[{"role":"user","content":"2 + 2?"},'
    b'{"role":"assistant","content":null,"tool_calls":[{"id":"c"}]}]}'
)


def imports(count: int, *, outcomes: int, source: Source = "import") -> list[Message]:
    """Conversations that never train; the first have an outcome of 1, the others have none."""
    run = SyntheticRun()
    for number in range(count):
        group_id, episode_id = f"i-{number}", f"i-{number}.0.0"
        asked = {"group_id": group_id, "domain": DOMAIN, "purpose": "eval"}
        one = {**asked, "group_size": 1, "task": TASK, "source": source}
        run.put(REQUESTED_GROUPS, RequestedGroup(**one, idempotency_key=group_id, requested_ms=0))
        run.put(ADMITTED_GROUPS, AdmittedGroup(**one, version_at_admission=0))
        end = FinishedEpisode(
            **one, episode_id=episode_id, index=0, attempt=0, status="completed", manifest=()
        )
        run.put(FINISHED_EPISODES, end)
        score = EpisodeScore(
            episode_id=episode_id,
            outcome=float(number < outcomes),
            speed=0.0,
            process=0.0,
            total=float(number < outcomes),
            is_masked=number >= outcomes,
        )
        run.put(SCORED_GROUPS, ScoredGroup(**asked, episodes=(score,), not_trainable="evaluated"))
        run.put(RETIRED_GROUPS, RetiredGroup(**asked, reason="evaluated"))
    return run.messages
