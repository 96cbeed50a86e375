"""What the reward service would give to graders for an episode that a test has played."""

from shop_desk.environment import ShopDesk
from shop_desk.shop import Order, as_task

from forgemq_contracts.grading import GradingCompletion, GradingEpisode
from tests.unit.demo.conftest import TokenPolicy


def graded(
    policy: TokenPolicy, desk: ShopDesk | None, order: Order, **changes: object
) -> GradingEpisode:
    """The episode that `policy` played at the shop desk; a desk has its clock."""
    virtual_s = None if desk is None else desk.clock_s
    fields = {"domain": "shop_desk", "task": as_task(order), "virtual_s": virtual_s, **changes}
    return graded_as(policy, **fields)


def graded_as(policy: TokenPolicy, **fields: object) -> GradingEpisode:
    """The episode that `policy` played, with these fields; `domain` and `task` are needed."""
    completions = tuple(
        GradingCompletion(
            completion_id=completion.completion_id,
            sequence=number,
            text=policy.rendering.decode(output),
            message=completion.message,
            messages_before=[],
            malformed_tool_calls=int(
                not completion.calls and "<tool_call>" in policy.rendering.decode(output)
            ),
            output_tokens=len(output),
            finish_reason=completion.finish_reason,
        )
        for number, (completion, output) in enumerate(
            zip(policy.completions, policy.outputs, strict=True)
        )
    )
    made = {
        "episode_id": "g.0.0",
        "result": {},
        "completions": completions,
        "rewards": (),
        "engine_s": 0.0,
        "tool_s": 0.0,
        "virtual_s": None,
        "duration_s": 0.0,
    }
    return GradingEpisode(**{**made, **fields})
