"""One idea of when a lane is dead: services that differ would wait for each other's lanes."""

from forgemq_contracts.weights import LANE_LAPSE_S
from forgemq_gateway.settings import GatewaySettings
from forgemq_inference.settings import InferenceSettings
from forgemq_scheduler.core.lanes import LANE_SILENCE_MAX_MS
from forgemq_trainer.settings import TrainerSettings


def test_gateway_trainer_and_scheduler_give_a_silent_lane_up_at_the_same_age():
    assert GatewaySettings(admin_key="k" * 16).lane_lapse_s == LANE_LAPSE_S
    assert TrainerSettings(folder="f").lane_lapse_s == LANE_LAPSE_S
    assert LANE_SILENCE_MAX_MS == LANE_LAPSE_S * 1000


def test_a_lane_may_miss_heartbeats_before_it_is_given_up():
    heartbeat_s = InferenceSettings(lane=0, engine_url="http://127.0.0.1:1").heartbeat_s
    assert 4 * heartbeat_s <= LANE_LAPSE_S
