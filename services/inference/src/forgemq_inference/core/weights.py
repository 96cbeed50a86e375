"""Which weights a lane loads next, and how: newest lineage first, then newest version."""

import re
from typing import NamedTuple, TypeAlias

from msgspec import Struct, structs

from forgemq_contracts.weights import (
    OfferedBroadcast,
    PublishedHead,
    PublishedWeights,
    Rendezvous,
)

_NAME = re.compile(r"(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)(-[0-9a-f]{12})?")
_SHA256_DIGITS = 12
"""In a name: two versions that differ have the same ones in one case of 3e14."""


class Weights(NamedTuple):
    """Names a state of the model's weights; compares by lineage, then by version."""

    lineage: int
    version: int

    @property
    def name(self) -> str:
        """For people, and the beginning of the engine's name for it."""
        return f"{self.lineage}.{self.version}"


BROKEN_NAME = "broken"
"""The engine's name for its weights during an update, and after one that broke off."""

BASE = Weights(0, 0)
"""The model the engine started with, before any trainer."""


def engine_name(published: PublishedWeights) -> str:
    """The engine's name for these weights: `<lineage>.<version>-<the beginning of their sha256>`.

    Another run has versions of equal numbers. If one of them is in an engine, its name differs.
    """
    return f"{_key(published).name}-{published.sha256[:_SHA256_DIGITS]}"


def weights_of_name(name: str) -> Weights | None:
    """The weights that an engine's name stands for; None if it does not begin with their numbers.

    The base model has a name of two numbers alone.
    """
    matched = _NAME.fullmatch(name)
    return Weights(int(matched[1]), int(matched[2])) if matched else None


class Served(Struct, frozen=True, kw_only=True):
    """What the engine holds.

    Attributes:
        weights: The version that it samples with.
        name: The engine's own name for them.
        sha256: Checksum of the bytes, if it is known.
        is_dirty: An update broke off, so the bytes are not those of the name.
    """

    weights: Weights
    name: str
    sha256: str | None = None
    is_dirty: bool = False


def served_by(name: str, *, base_sha256: str | None) -> Served:
    """What an engine with this name for its weights holds.

    Args:
        name: As the engine reports it; one without lineage and version stands for the base model.
        base_sha256: Of the model the engine was started with; None if unknown.
    """
    if name == BROKEN_NAME:
        return Served(weights=BASE, name=name, is_dirty=True)
    weights = weights_of_name(name) or BASE
    if weights == BASE:
        return Served(weights=BASE, name=BASE.name, sha256=base_sha256)
    return Served(weights=weights, name=name)


class Rename(NamedTuple):
    """The engine holds these bytes already; only the name changes."""

    published: PublishedWeights


class FastLoad(NamedTuple):
    """The engine receives the weights from the trainer; if that fails, the durable copy."""

    published: PublishedWeights
    rendezvous: Rendezvous


class RelayedLoad(NamedTuple):
    """The engine reads the files that the relay brings; if it does not, the durable copy."""

    published: PublishedWeights


class DurableLoad(NamedTuple):
    """The engine reads the durable copy."""

    published: PublishedWeights


class Join(NamedTuple):
    """The engine joins a process group, for versions that come later."""

    rendezvous: Rendezvous
    deadline_s: float


Load: TypeAlias = Rename | FastLoad | RelayedLoad | DurableLoad


class WeightsState:
    """Published against served weights of one lane under one epoch.

    `observe` every record of published-weights; `next_load` decides; then either `note_loaded`,
    `note_failed` or `note_broken`. Process groups are remembered by name as long as they work.

    Example: serving 1.4, a restarted trainer publishes 2.3: `next_load` gives 2.3, because a new
    lineage fences the old one even with fewer steps.

    Example: 1.5 is published before it is durable, and the engine fails to receive it. `next_load`
    gives 1.4, which is durable and known to be whole, and 1.5 once its copy is published.
    """

    def __init__(self, *, lane: int, epoch: int, served: Served) -> None:
        """Begin with nothing published."""
        self._lane = lane
        self._epoch = epoch
        self._newest: PublishedWeights | None = None
        self._durable: PublishedWeights | None = None
        self._failed: Weights | None = None
        self._head: PublishedHead | None = None
        self._durable_head: PublishedHead | None = None
        self._held_head_sha256: str | None = None
        self._groups: set[str] = set()
        self._shared_group = ""
        self._offered: Join | None = None
        self.served = served
        self._highest = served.weights

    def observe(self, published: PublishedWeights) -> bool:
        """Note a publication; True if it is the newest so far, or the newest one's durable copy."""
        if not self._is_news(published):
            return False
        self._newest = published
        # A version may come without a head: then that of the version before it stays.
        self._head = published.head or self._head
        if published.is_durable:
            self._durable = published
            self._durable_head = published.head or self._durable_head
        return True

    def _is_news(self, published: PublishedWeights) -> bool:
        newest = self._newest
        if newest is None or _key(published) > _key(newest):
            return True
        is_same = _key(published) == _key(newest)
        return is_same and published.is_durable and not newest.is_durable

    def observe_offer(self, offered: OfferedBroadcast) -> bool:
        """Note a group that is to be formed; True if the engine is to join it."""
        self._offered = None  # Only the newest offer still has a trainer that waits.
        for each in offered.members:
            if (each.lane, each.epoch) == (self._lane, self._epoch):
                self._offered = Join(each, offered.deadline_s)
        return self._offered is not None

    def take_join(self) -> Join | None:
        """The group to join, once; None if none is offered."""
        offered, self._offered = self._offered, None
        return offered

    @property
    def shared_group(self) -> str:
        """The group of several lanes that the engine is in; "" if it is in none."""
        return self._shared_group if self._shared_group in self._groups else ""

    def note_shared(self, group_name: str) -> None:
        """Note that the engine is in this group of several lanes."""
        self._groups.add(group_name)
        self._shared_group = group_name

    def groups_besides(self, group_name: str) -> tuple[str, ...]:
        """Which other groups the engine is in; nobody sends through them once it is in this one."""
        return tuple(sorted(self._groups - {group_name}))

    @property
    def newest(self) -> PublishedWeights | None:
        """The newest publication, durable or not."""
        return self._newest

    @property
    def newest_known(self) -> Weights:
        """The newest weights that the engine can hold: published, or held under this epoch."""
        known = max(self._highest, self.served.weights)
        return known if self._newest is None else max(known, _key(self._newest))

    def is_foreign(self, served: Served) -> bool:
        """Whether an engine has these weights from another run: nobody has published them here.

        Older ones than are published are not compared, since newer ones are loaded in any case.
        """
        if served.weights > (BASE if self._newest is None else _key(self._newest)):
            return True
        return any(
            served.weights == _key(known) and served.name != engine_name(known)
            for known in (self._newest, self._durable)
            if known is not None
        )

    def is_replaced(self, published: PublishedWeights) -> bool:
        """Whether newer weights than these are published."""
        return self._newest is not None and _key(self._newest) > _key(published)

    @property
    def durable(self) -> PublishedWeights | None:
        """The newest durable weights that are published, which the engine may hold already."""
        return self._durable

    @property
    def has_gone_back(self) -> bool:
        """Whether the engine holds older weights than it has held under this epoch.

        So it is if it starts again before the copy is there of weights that it was sent: under one
        epoch every reader of heartbeats counts on the newest weights that the lane has named.
        """
        return self.served.weights < self._highest

    def next_load(self) -> Load | None:
        """What to load next; None if the engine holds the newest weights that it can load."""
        newest = self._newest
        if newest is None:
            return None
        if self.served.is_dirty:
            return None if self._durable is None else DurableLoad(self._durable)
        if _key(newest) <= self.served.weights:
            return None
        if newest.sha256 == self.served.sha256 and self.missing_head(newest) is None:
            return Rename(newest)
        return self._fast_load(newest) or self.durable_load()

    def durable_load(self) -> DurableLoad | None:
        """The newest durable copy; None if it is not newer than what the engine holds."""
        durable = self._durable
        if durable is None or _key(durable) <= self.served.weights:
            return None
        return DurableLoad(durable)

    def _fast_load(self, newest: PublishedWeights) -> FastLoad | RelayedLoad | None:
        if _key(newest) == self._failed:
            return None
        if any((to.lane, to.epoch) == (self._lane, self._epoch) for to in newest.relayed_to):
            return RelayedLoad(newest)
        rendezvous = self._rendezvous(newest)
        return None if rendezvous is None else FastLoad(newest, rendezvous)

    def missing_head(self, published: PublishedWeights) -> PublishedHead | None:
        """The draft head that these weights are loaded with; None if the engine drafts with it.

        It is the newest head that is published, of a durable copy the newest durable one.
        """
        head = self._durable_head if published.is_durable else self._head
        return None if head is None or head.sha256 == self._held_head_sha256 else head

    def note_head(self, sha256: str | None) -> None:
        """Note which head the engine drafts with; None while that is unknown."""
        self._held_head_sha256 = sha256

    def note_joined(self, group_name: str) -> None:
        """Note that the engine is in this process group."""
        self._groups.add(group_name)

    def note_left(self, group_name: str) -> None:
        """Note that the process group is gone; idempotent."""
        self._groups.discard(group_name)

    def note_loaded(self, published: PublishedWeights) -> None:
        """Note that the engine holds these weights completely."""
        self.served = Served(
            weights=_key(published), name=engine_name(published), sha256=published.sha256
        )
        self._highest = max(self._highest, self.served.weights)

    def note_failed(self, published: PublishedWeights) -> None:
        """Note that these weights did not come on their fast path, which is not tried again."""
        self._failed = _key(published)

    def note_broken(self) -> None:
        """Note that an update began or broke off: what the engine holds is unknown until a load."""
        self.served = structs.replace(self.served, is_dirty=True, sha256=None)

    def note_restarted(self, served: Served) -> None:
        """Note a new engine process: it holds these weights and is in no process group."""
        self.served = served
        self._highest = max(self._highest, served.weights)
        self._held_head_sha256 = None
        self._offered = None
        self._groups.clear()

    def _rendezvous(self, published: PublishedWeights) -> Rendezvous | None:
        for offer in published.fast_paths:
            is_ours = (offer.lane, offer.epoch) == (self._lane, self._epoch)
            if is_ours and (offer.is_new or offer.group_name in self._groups):
                return offer
        return None


def _key(published: PublishedWeights) -> Weights:
    return Weights(published.lineage, published.version)
