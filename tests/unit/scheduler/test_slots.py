"""When slots are free, and under which weights groups are admitted."""

from forgemq_contracts.lanes import LANE_LAPSE_MS
from tests.unit.scheduler.scene import scene_of


def test_the_slots_of_a_step_are_free_when_all_live_lanes_serve_its_weights():
    scene = scene_of(lanes_reported=2)
    scene.request(*range(20))
    scene.merge(*range(6))
    scene.train(0)
    assert scene.ends() == dict.fromkeys(range(6), "trained")
    assert {group.step for group in scene.retired} == {0}
    scene.load(0, version=1)
    assert len(scene.admitted) == 12
    scene.load(1, version=1)
    assert scene.admitted_ids()[12:] == [12, 13, 14, 15, 16, 17]
    assert scene.admitted[-1].version_at_admission == 1


def test_a_heartbeat_alone_releases_slots_as_a_loaded_record_does():
    scene = scene_of()
    scene.request(*range(20))
    scene.merge(*range(6))
    scene.train(0)
    scene.report(version=1)
    assert len(scene.admitted) == 18


def test_a_silent_lane_holds_slots_until_it_lapses_and_no_longer():
    scene = scene_of(lanes_reported=2)
    scene.request(*range(20))
    scene.merge(*range(6))
    scene.train(0)
    scene.load(0, version=1)
    for second in range(1, LANE_LAPSE_MS // 1000 + 1):
        scene.report(0, version=1)
        scene.tick(second)
    assert len(scene.admitted) == 12
    scene.tick(LANE_LAPSE_MS / 1000 + 0.5)
    assert len(scene.admitted) == 18


def test_a_lane_that_starts_again_on_the_base_model_takes_nothing_back():
    scene = scene_of()
    scene.request(*range(30))
    scene.merge(*range(6))
    scene.train(0)
    scene.load(version=1)
    scene.report(0, epoch=1, lineage=0, version=0)
    scene.merge(6, not_trainable="failed")
    assert scene.admitted[-1].version_at_admission == 1
    scene.report(0, epoch=0, version=9)  # a late heartbeat of the old epoch
    scene.load(0, epoch=0, version=9)
    scene.merge(7, not_trainable="failed")
    assert scene.admitted[-1].version_at_admission == 1


def test_weights_never_go_back_within_an_epoch():
    scene = scene_of()
    scene.load(version=4)
    scene.report(version=3)
    scene.request(1)
    assert scene.admitted[0].version_at_admission == 4


def test_a_trainer_that_falls_back_to_its_checkpoint_holds_the_slots_again():
    scene = scene_of()
    scene.request(*range(40))
    scene.merge(*range(6))
    scene.train(0, checkpoint=-1)
    scene.load(version=1)
    assert len(scene.admitted) == 18
    scene.load(version=0, lineage=2)
    scene.merge(6, not_trainable="failed")
    assert len(scene.admitted) == 18, "6 slots of step 0 are held until version 1 serves again"
    scene.load(version=1, lineage=2)
    assert scene.admitted_ids()[18:] == [18]


def test_an_admission_names_the_weights_that_a_lane_must_serve_for_its_requests():
    scene = scene_of(lanes_reported=2)
    for lane in range(2):
        scene.load(lane, version=3)
    scene.request(1)
    scene.load(1, version=1, lineage=2)  # a restarted trainer; lane 0 has not followed yet
    scene.request(2)
    scene.load(0, version=1, lineage=2)
    scene.request(3)
    found = [(g.lineage_at_admission, g.version_at_admission) for g in scene.admitted]
    assert found == [(1, 3), (1, 1), (2, 1)]
