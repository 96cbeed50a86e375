"""The groups that `tree_training_gpu` trains, and how a byte budget plans each."""

from dataclasses import dataclass

from tree_memory import PLAN_200K, planned
from tree_timing import HEAD_CHUNK
from tree_workloads import SHAPES, Shape

from forgemq_trainer.core.memory import Microbatch, ModelShape
from forgemq_trainer.core.tree import Forest


@dataclass(frozen=True, kw_only=True)
class Case:
    """A group's shape, and the share of the bytes of its whole tree that its blocks may take.

    Attributes:
        tree: Rollouts of an agent.
        blocks_share: None if the tree is not cut.
    """

    tree: Shape
    blocks_share: float | None = None

    def blocks(self, forest: Forest, shape: ModelShape) -> Microbatch | None:
        """The tree's blocks, as the trainer plans them within the share."""
        if self.blocks_share is None:
            return None
        budget = int(whole_bytes(forest, shape) * self.blocks_share)
        return planned(forest, shape, budget=budget)


CASES = {
    "32k": Case(
        tree=Shape(rollouts=8, turns=10, prompt=2048, act=120, observe=280), blocks_share=0.3
    ),
    "100k": Case(tree=Shape(rollouts=16, turns=20, prompt=6144, act=120, observe=180)),
    "100k, stripped": Case(
        tree=Shape(rollouts=8, turns=13, prompt=6144, act=200, observe=300, think=250)
    ),
    "200k": Case(tree=PLAN_200K, blocks_share=0.075),
}
"""Short tool use; long tool use; tool use with reasoning stripped from histories; software work."""

UNSCALED_CASES = {
    "8B, 200k": Case(tree=PLAN_200K, blocks_share=0.095),
    "8B, 200k, offloaded": Case(tree=PLAN_200K, blocks_share=0.0435),
}
"""All 36 layers: a budget that an H200 has room for, and the plan of docs/tree_training.md, whose
keys go to the host."""

GRADIENT_CASE = Case(tree=SHAPES["A"])


def whole_bytes(forest: Forest, shape: ModelShape) -> int:
    """Bytes that the tree takes at once, by the formula."""
    return shape.block_bytes(forest.token_count, chunk=HEAD_CHUNK, is_carried=False)
