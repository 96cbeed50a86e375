"""What the loss of each group of an update is multiplied by: how the loss is normalised."""

from collections.abc import Mapping, Sequence

from forgemq_contracts.loss import Loss
from forgemq_contracts.supervised import loss_parts
from forgemq_trainer.core.tree import Forest


def mixed_loss_weights(
    forests: Sequence[Forest],
    *,
    domains: Sequence[str],
    fractions: Mapping[str, float],
    loss: Loss,
) -> list[float]:
    """The loss weight of each group of an update, in which some domains may be supervised.

    Each kind of group has its part of the loss (`supervised.loss_parts`), whatever its tokens. In
    its part a supervised domain divides by its own tokens; the other domains divide as
    `group_loss_weights` says of them alone.

    Args:
        forests: Of the update's groups.
        domains: One for each of them.
        fractions: By supervised domain.
        loss: The run's.
    """
    if not fractions:
        return group_loss_weights(forests, loss=loss)
    weights = [0.0] * len(forests)
    parts = loss_parts(domains, fractions)
    kinds = [domain if domain in fractions else "" for domain in domains]
    for kind in dict.fromkeys(kinds):
        own = [n for n, each in enumerate(kinds) if each == kind]
        settings = Loss() if kind else loss  # By tokens, the default.
        alone = group_loss_weights([forests[n] for n in own], loss=settings)
        for n, weight in zip(own, alone, strict=True):
            weights[n] = parts[n] * weight
    return weights


def group_loss_weights(forests: Sequence[Forest], *, loss: Loss) -> list[float]:
    """The loss weight of each group, as the run's loss configuration says.

    step: 1 / entries of all groups. group: 1 / (groups with entries * entries of the group).
    With group_tokens: 1 / (groups * group_tokens), so that no length has a part in it. That is
    Dr. GRPO, arXiv 2503.20783 section 3.2, if group_tokens is the number of a group's rollouts
    times the most tokens of one.
    """
    counts = [forest.entry_count for forest in forests]
    if loss.group_tokens is not None:
        return [1 / (len(counts) * loss.group_tokens)] * len(counts)
    if loss.normalisation == "step":
        return [1 / max(1, sum(counts))] * len(counts)
    groups = sum(count > 0 for count in counts)
    return [1 / (groups * count) if count else 0.0 for count in counts]
