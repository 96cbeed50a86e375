"""What an engine holds against what was sent, and a group that is offered to a lane."""

import asyncio

import msgspec
from stand_in_answers import Speed
from stand_in_engine import StandInEngine

from forgemq_contracts import topics
from forgemq_contracts.weights import OfferedBroadcast, SampledParameter
from forgemq_inference.core.read_back import RankChecksums, RankPlace, wrong_parameters
from forgemq_inference.core.weights import BASE, WeightsState, served_by
from tests.lane_scene import LaneScene
from tests.unit.inference.test_weight_loads import rendezvous, serving_scene

NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
SENT = (
    SampledParameter(name=NORM, sha256="a" * 64),
    SampledParameter(name=DOWN, sha256="b" * 64),
)


def rank(norm: str, down: str, *, tp_size: int = 1) -> RankChecksums:
    return RankChecksums(
        checksums={NORM: norm * 16, DOWN: down * 16}, parallelism_info=[RankPlace(tp_size)]
    )


def test_a_parameter_with_another_checksum_is_wrong() -> None:
    assert wrong_parameters(SENT, [rank("a", "b")]) == ()
    assert wrong_parameters(SENT, [rank("a", "c")]) == (DOWN,)
    assert wrong_parameters(SENT, [rank("c", "c")]) == (DOWN, NORM)


def test_each_engine_of_a_pair_is_compared() -> None:
    assert wrong_parameters(SENT, [rank("a", "b"), rank("a", "c")]) == (DOWN,)


def test_of_an_engine_of_several_processes_only_what_each_has_whole_is_compared() -> None:
    assert wrong_parameters(SENT, [rank("a", "c", tp_size=2), rank("a", "d", tp_size=2)]) == ()
    assert wrong_parameters(SENT, [rank("a", "c", tp_size=2), rank("e", "d", tp_size=2)]) == (NORM,)


def test_a_parameter_that_the_engine_does_not_have_is_not_compared() -> None:
    assert wrong_parameters(SENT, [RankChecksums(checksums={})]) == ()


def test_the_checksums_of_an_engine_are_read_from_its_answer() -> None:
    answer = {
        "checksums": {NORM: "0123456789abcdef"},
        "per_gpu_checksum": "f" * 64,
        "parallelism_info": [{"role": "target", "tp_rank": 1, "tp_size": 2}],
    }
    found = msgspec.convert(answer, RankChecksums)
    assert found.has_parts
    assert found.checksums[NORM] == "0123456789abcdef"


async def until_in_group(scene: LaneScene, name: str) -> None:
    """Return once the lane's heartbeat names this group."""
    while True:
        if (await scene.report(is_serving=True)).process_group == name:
            return
        await asyncio.sleep(0.02)


async def test_an_engine_joins_the_group_that_is_offered_and_its_heartbeat_says_so(base) -> None:
    engine = StandInEngine(Speed(pretends_groups=True))
    async with serving_scene(base, engine) as scene:
        for name in ("first", "second"):
            async with rendezvous(group_name=name) as place:
                offered = OfferedBroadcast(
                    lineage=1, group_name=name, members=(place,), deadline_s=5.0
                )
                await scene.write(topics.OFFERED_BROADCASTS, 0, offered)
                await scene.until_event("group_joined")
                await until_in_group(scene, name)
        assert engine.groups == {"second"}
    joined = [event["group"] for event in scene.events_named("group_joined")]
    assert joined == ["first", "second"]


async def test_a_group_that_is_not_formed_leaves_the_lane_serving_and_in_none(base) -> None:
    async with serving_scene(base, StandInEngine(Speed())) as scene, rendezvous() as place:
        offered = OfferedBroadcast(lineage=1, group_name="g", members=(place,), deadline_s=5.0)
        await scene.write(topics.OFFERED_BROADCASTS, 0, offered)
        await scene.until_event("group_not_joined")
        report = await scene.report(is_serving=True)
        await scene.request(1, [5, 6, 7])
        (record,) = await scene.finished(count=1)
    assert (report.process_group, record.error) == ("", "")


async def test_a_version_comes_through_the_joined_group_and_else_from_the_durable_copy(
    base, trained
) -> None:
    """It does not come through a group that the engine is not in."""
    engine = StandInEngine(Speed(pretends_groups=True))
    async with serving_scene(base, engine) as scene, rendezvous(group_name="all") as place:
        offered = OfferedBroadcast(lineage=1, group_name="all", members=(place,), deadline_s=5.0)
        await scene.write(topics.OFFERED_BROADCASTS, 0, offered)
        await scene.until_event("group_joined")
        formed = msgspec.structs.replace(place, is_new=False)
        await scene.publish(trained, version=1, fast_paths=(formed,))
        await scene.loaded(count=2)
        other = msgspec.structs.replace(formed, group_name="other")
        await scene.publish(base, version=2, fast_paths=(other,))
        loaded = await scene.loaded(count=3)
    assert [record.path for record in loaded] == ["start", "fast", "durable"]


def test_only_the_newest_offer_to_this_lane_and_epoch_is_taken_and_once() -> None:
    state = WeightsState(lane=1, epoch=2, served=served_by(BASE.name, base_sha256=None))

    def offer(name: str, *, lane: int, epoch: int) -> bool:
        place = {
            "lane": lane,
            "epoch": epoch,
            "host": "h",
            "port": 1,
            "group_name": name,
            "backend": "gloo",
            "is_new": True,
        }
        offered = {"lineage": 1, "group_name": name, "members": [place], "deadline_s": 3.0}
        return state.observe_offer(msgspec.convert(offered, OfferedBroadcast))

    assert offer("a", lane=1, epoch=2)
    assert offer("b", lane=1, epoch=2)
    join = state.take_join()
    assert join is not None
    assert (join.rendezvous.group_name, join.deadline_s) == ("b", 3.0)
    assert state.take_join() is None
    assert not offer("c", lane=1, epoch=1)
    assert offer("d", lane=1, epoch=2)
    assert not offer("e", lane=0, epoch=2)
    assert state.take_join() is None


def test_a_group_of_several_lanes_is_left_with_the_engine_that_was_in_it() -> None:
    state = WeightsState(lane=0, epoch=1, served=served_by(BASE.name, base_sha256=None))
    state.note_joined("own")
    state.note_shared("all")
    assert state.groups_besides("all") == ("own",)
    assert state.shared_group == "all"
    state.note_left("all")
    assert state.shared_group == ""
    state.note_shared("all")
    state.note_restarted(served_by(BASE.name, base_sha256=None))
    assert state.shared_group == ""
