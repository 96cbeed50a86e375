"""One process group for all lanes, of which the thread that sends may let go at any moment."""

import torch

from forgemq_trainer.core.shared_members import GroupMember
from forgemq_trainer.process_group import GroupPlace, WeightGroup
from forgemq_trainer.shared_path import SharedPath, _Shared
from forgemq_trainer.transfer_deadline import TransferDeadline

DEADLINE = TransferDeadline(1.0, 1e9)
PLACE = GroupPlace(host="127.0.0.1", backend="gloo", device=torch.device("cpu"), deadline=DEADLINE)


class LaneOfAFailedTransfer(int):
    """A lane that is looked up at the moment at which `send` finds that its transfer failed."""

    path: SharedPath

    def __hash__(self) -> int:
        self.path.drop()
        return int(self)


def test_the_last_lane_may_be_given_up_while_its_transfer_fails() -> None:
    path = SharedPath(host="127.0.0.1", backend="gloo", deadline=DEADLINE)
    group = WeightGroup("g", world_size=2, place=PLACE)
    path._formed, path._is_sending = _Shared(group, (GroupMember(0, 1, 1),)), True
    lane = LaneOfAFailedTransfer(0)
    lane.path = path
    path.give_up(lane)
    assert (group.is_given_up, path.members, path.group_name) == (True, (), "")
