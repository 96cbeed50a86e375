"""Few players for many admitted episodes are named with the numbers."""

import pytest

from forgemq_contracts.players import shortage
from forgemq_contracts.run import Episodes, Model, Queue, RunConfiguration, Trainer


@pytest.mark.parametrize(("players", "is_short"), [(64, True), (255, True), (256, False)])
def test_fewer_players_than_a_quarter_of_what_is_admitted_are_too_few(players, is_short):
    queue = Queue(domain="shop", task_source="", agent="", slots=64, group_size=16)
    configuration = RunConfiguration(
        run="r",
        seed=0,
        model=Model(path="m"),
        queues=(queue,),
        trainer=Trainer(steps=1),
        episodes=Episodes(concurrent_max=players),
    )
    said = shortage(configuration)
    assert bool(said) == is_short
    if is_short:
        assert f"concurrent_max is {players}" in said
        assert "N x G = 1024 episodes (shop: 64 x 16)" in said
