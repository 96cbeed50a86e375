"""Plans of updates, remembered by what their trees look like.

In a step the same trees are planned several times: alone, to see whether each group has a plan;
together, to read the reference's log-probabilities and the policy's; and in each pass over them.
A plan depends on the branches and on where entries are, not on tokens, log-probabilities or routes.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence

from forgemq_trainer.core.traffic import UpdatePlan
from forgemq_trainer.core.tree import Forest

PLANS_MAX = 256
"""So many are kept, the newest: more than a usual step has groups, each planned alone, and
minibatches. A plan that was dropped is made again, as it was."""


class RememberedPlans:
    """The plans of a model's updates; each is the same whether it was remembered or not.

    Example: a step with a reference, 2 minibatches and 3 passes is planned 3 times: once for the
    reading, and once for each minibatch, though it has 6 updates.
    """

    def __init__(self, plan: Callable[[Sequence[Forest]], UpdatePlan]) -> None:
        """Remember nothing yet.

        Args:
            plan: A pure function of the trees' form; what it raises is not remembered.
        """
        self._plan = plan
        self._plans: dict[tuple[bytes, ...], UpdatePlan] = {}

    def of(self, forests: Sequence[Forest]) -> UpdatePlan:
        """The plan of an update over these trees, in this order.

        Raises:
            ValueError: the budget is below the least that a group needs.
        """
        key = tuple(tree_form(forest) for forest in forests)
        if key not in self._plans:
            self._plans[key] = self._plan(forests)
            if len(self._plans) > PLANS_MAX:
                del self._plans[next(iter(self._plans))]
        return self._plans[key]


def tree_form(forest: Forest) -> bytes:
    """A digest of what a plan depends on: the segments, and each entry's token and temperature."""
    arrays = (
        forest.segment_start_M,
        forest.segment_parent_M,
        forest.entry_token_E,
        forest.entry_temperature_E,
    )
    digest = hashlib.blake2b(digest_size=16)
    counts = (forest.token_count, len(forest.segment_start_M), forest.entry_count)
    digest.update(struct.pack("<3q", *counts))
    for array in arrays:
        digest.update(array.tobytes())
    return digest.digest()
