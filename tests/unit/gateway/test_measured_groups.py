"""What a gateway says of its groups, alone and beside another gateway."""

from dataclasses import replace
from pathlib import Path

import msgspec

from forgemq_contracts.groups import ClosedGroup
from forgemq_gateway.ticks import measure_groups
from tests.metered import metered
from tests.unit.gateway.scripted_lane import GROUP_PARTITIONS
from tests.unit.gateway.test_abandoned import Scene, scene_of
from tests.unit.gateway.test_held_and_leased import INDICES, admitted, opened

GROUPS = 12
OPEN = ("gateway.episodes_open", (("domain", "shop"),))


def admit(scene: Scene) -> None:
    for number in range(GROUPS):
        record = msgspec.structs.replace(admitted(number), domain="shop")
        scene.context.registry.apply_admitted_group(record)


def measured(scene: Scene) -> tuple[float, float, float]:
    """Groups, those that nobody has claimed, and episodes that are open."""
    telemetry, held = metered("gateway")
    measure_groups(replace(scene.context, telemetry=telemetry))
    found = held()
    return found["gateway.groups", ()], found["gateway.groups_unclaimed", ()], found[OPEN]


async def test_the_counts_of_two_gateways_add_up_to_those_of_the_run(model: Path) -> None:
    """Each knows all groups, but only of its own which episodes are claimed."""
    async with scene_of(model) as one, scene_of(model) as other:
        one.context.gateways.serving = {0}
        other.context.gateways.serving = set(range(1, GROUP_PARTITIONS))
        for scene in (one, other):
            admit(scene)
            for number in range(GROUPS):
                if scene.context.gateways.serves(f"g-{number}"):
                    scene.context.registry.apply_opened_episode(
                        opened(number, 0, attempt=0), lease_until_s=110.0
                    )
        counts = measured(one), measured(other)
    assert all(each[0] > 0 for each in counts)
    assert tuple(map(sum, zip(*counts, strict=True))) == (GROUPS, 0, GROUPS * INDICES)


async def test_an_episode_is_open_until_it_ends_or_its_group_is_closed(model: Path) -> None:
    async with scene_of(model) as scene:
        admit(scene)
        before = measured(scene)
        group = scene.context.registry.groups["g-0"]
        group.finished[1] = "g-0.1.0"
        one_ended = measured(scene)
        closed = ClosedGroup(group_id="g-1", domain="shop", purpose="train")
        scene.context.registry.apply_closed_group(closed)
        one_closed = measured(scene)
    assert before == (GROUPS, GROUPS, GROUPS * INDICES)
    assert one_ended[2] == GROUPS * INDICES - 1
    assert one_closed[2] == GROUPS * INDICES - 1 - INDICES


async def test_conversations_of_live_traffic_ask_for_no_agents(model: Path) -> None:
    async with scene_of(model) as scene:
        admit(scene)
        before = measured(scene)
        live = msgspec.structs.replace(admitted(GROUPS), domain="shop", source="live")
        scene.context.registry.apply_admitted_group(live)
        after = measured(scene)
    assert after == (before[0] + 1, before[1] + 1, before[2])
