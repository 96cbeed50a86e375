"""Which gateways of a run are there, and which group partitions each of them owns and should own.

Owners change by records on owned-runs alone, and every gateway reads the same ones: so all agree
on who owns what. What a gateway reads of the others decides only which change it proposes itself.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence

import msgspec
from msgspec import Struct

from forgemq_contracts.ownership import OwnedRun, PartitionOwner, ReportedGateway
from forgemq_contracts.partitions import group_partition

LAPSE_S = 3.0
"""Three reports are missing: the gateway's process is gone, or stands still."""


class Peer(Struct, frozen=True, kw_only=True):
    """What was last heard of a gateway."""

    report: ReportedGateway
    heard_s: float


class Gateways:
    """The gateways of a run, as one of them sees it.

    A peer has lapsed if the newest of this gateway's own reports came back from the log `LAPSE_S`
    after the newest one of the peer: while the log is away, nobody lapses.

    Args:
        gateway: Id of this gateway.
        url: Where it answers others.
        partitions: Group partitions of the run.
    """

    def __init__(self, gateway: str, *, url: str, partitions: int) -> None:
        self.gateway = gateway
        self.url = url
        self.is_leaving = False
        self.record: OwnedRun | None = None
        self.serving: set[int] = set()
        """Partitions that this gateway owns and has restored."""
        self._partitions = partitions
        self._peers: dict[str, Peer] = {}
        self._gone: set[str] = set()
        self._owner_of: dict[int, PartitionOwner] = {}
        self._gained: dict[int, int] = {}

    @property
    def owner(self) -> int:
        """Number of the newest change of owners; 0: there was none."""
        return 0 if self.record is None else self.record.owner

    def take_owners(self, record: OwnedRun) -> tuple[frozenset[int], frozenset[int]]:
        """Take a change of owners; returns what this gateway has gained and lost by it.

        An older record than the newest changes nothing.
        """
        before = self.own()
        if record.owner >= self.owner:
            self.record = record
            self._owner_of = {
                number: owner for owner in record.owners for number in owner.partitions
            }
        after = self.own()
        self.serving &= after
        self._gained |= dict.fromkeys(after - before, record.owner)
        return after - before, before - after

    def hear(self, report: ReportedGateway, *, heard_s: float) -> None:
        """Take a gateway's word that it is there, in the order of the log."""
        self._peers[report.gateway] = Peer(report=report, heard_s=heard_s)
        self._gone.discard(report.gateway)

    def successor(self) -> ReportedGateway | None:
        """A gateway at this one's address that started later: this one is to end."""
        own = self._peers.get(self.gateway)
        if own is None:
            return None
        return next((each.report for each in self._heard() if _follows(each, own)), None)

    def note_gone(self, gateway: str) -> None:
        """Note that nobody listens at the address of this gateway: it is gone until heard again."""
        self._gone.add(gateway)

    def draw(self) -> float:
        """From 0 to below 1, another for each gateway and each change of owners.

        Two gateways that meet in a change do not meet again in step.
        """
        seed = f"{self.gateway} {self.owner}".encode()
        return int.from_bytes(hashlib.blake2b(seed, digest_size=4).digest()) / 2**32

    def own(self) -> frozenset[int]:
        """The partitions that this gateway owns."""
        return frozenset(
            number for number, owner in self._owner_of.items() if owner.gateway == self.gateway
        )

    def partition_of(self, group_id: str) -> int:
        """The partition that a group belongs to."""
        return group_partition(group_id, partitions=self._partitions)

    def serves(self, group_id: str) -> bool:
        """Whether this gateway owns the group and knows all about its episodes."""
        return self.partition_of(group_id) in self.serving

    def tenure(self, group_id: str) -> int | None:
        """Which time it is that this gateway serves the group; None if it does not.

        Another number than before says that the group has left and come back meanwhile.
        """
        number = self.partition_of(group_id)
        return self._gained[number] if number in self.serving else None

    def gained(self, numbers: Collection[int]) -> dict[int, int]:
        """By which change this gateway has gained each of these partitions that it owns now."""
        own = self.own()
        return {number: self._gained[number] for number in numbers if number in own}

    def unfenced(self) -> frozenset[str]:
        """Earlier owners of this gateway's partitions, whose writers it may not have fenced yet."""
        owners = () if self.record is None else self.record.owners
        mine = next((owner for owner in owners if owner.gateway == self.gateway), None)
        return frozenset(() if mine is None else mine.unfenced)

    @property
    def serves_all(self) -> bool:
        """Whether this gateway serves every partition."""
        return len(self.serving) == self._partitions

    def owner_of(self, partition: int) -> PartitionOwner | None:
        """Who owns a partition; None if nobody ever did."""
        return self._owner_of.get(partition)

    def peers(self) -> list[ReportedGateway]:
        """The newest reports of the other gateways that are there."""
        return [
            peer.report
            for gateway, peer in sorted(self._peers.items())
            if gateway != self.gateway and self._is_there(peer)
        ]

    def has_peer(self, gateway: str) -> bool:
        """Whether this other gateway is there."""
        peer = self._peers.get(gateway)
        return peer is not None and gateway != self.gateway and self._is_there(peer)

    def wanted(self) -> frozenset[int]:
        """The partitions that this gateway should take over now; empty if none."""
        there = [each.gateway for each in self.peers() if not each.is_leaving]
        if not self.is_leaving:
            there.append(self.gateway)
        owners = {number: owner.gateway for number, owner in self._owner_of.items()}
        shares = shared_out(self._partitions, owners=owners, gateways=sorted(there))
        mine = {number for number, gateway in shares.items() if gateway == self.gateway}
        return frozenset(mine - self.own())

    def forget_lapsed(self) -> None:
        """Forget gateways that lapsed long ago."""
        lapsed = [name for name, peer in self._peers.items() if self._silent_s(peer) > 60 * LAPSE_S]
        for name in lapsed:
            del self._peers[name]
            self._gone.discard(name)

    def _is_there(self, peer: Peer) -> bool:
        if peer.report.gateway in self._gone or self._silent_s(peer) > LAPSE_S:
            return False
        is_own_address = peer.report.url == self.url
        # A process that is gone may have started with a clock that was ahead.
        return not is_own_address and not any(_follows(other, peer) for other in self._heard())

    def _heard(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if self._silent_s(peer) <= LAPSE_S]

    def _silent_s(self, peer: Peer) -> float:
        own = self._peers.get(self.gateway)
        return 0.0 if own is None else own.heard_s - peer.heard_s


def _follows(later: Peer, earlier: Peer) -> bool:
    """Whether a gateway started at the address of another one after it."""
    one, other = later.report, earlier.report
    started = (one.started_ms, one.gateway) > (other.started_ms, other.gateway)
    return one.url == other.url and started


def shared_out(
    partitions: int, *, owners: Mapping[int, str], gateways: Sequence[str]
) -> dict[int, str]:
    """Who should own each partition: the same answer for everyone who knows the same.

    Nobody gets more than one partition more than another, and as few as possible change hands.

    Example: 0 to 3 belong to a, and b comes: 2 and 3 go to b.

    Args:
        partitions: How many there are.
        owners: Who owns each now; also gateways that are gone.
        gateways: Those that are there, sorted.

    Returns:
        A gateway for every partition; empty if there is no gateway.
    """
    if not gateways:
        return {}
    least, more = divmod(partitions, len(gateways))
    held: dict[str, list[int]] = {gateway: [] for gateway in gateways}
    for number in range(partitions):
        if owners.get(number) in held:
            held[owners[number]].append(number)
    # Those that hold most keep one more: then the fewest change hands.
    by_count = sorted(gateways, key=lambda gateway: (-len(held[gateway]), gateway))
    room = {gateway: least + (place < more) for place, gateway in enumerate(by_count)}
    shares = {number: gateway for gateway in gateways for number in held[gateway][: room[gateway]]}
    return shares | _rest(partitions, shares=shares, room=room)


def _rest(partitions: int, *, shares: Mapping[int, str], room: Mapping[str, int]) -> dict[int, str]:
    """Gateways with room for the partitions that nobody keeps."""
    counts = {gateway: 0 for gateway in room}
    for gateway in shares.values():
        counts[gateway] += 1
    free = [gateway for gateway in sorted(room) for _ in range(room[gateway] - counts[gateway])]
    left = (number for number in range(partitions) if number not in shares)
    return dict(zip(left, free, strict=True))


def with_owner(
    owners: Sequence[PartitionOwner], taken: Collection[int], *, gateway: str, url: str
) -> tuple[PartitionOwner, ...]:
    """The owners once this gateway has these partitions too; who has none is left out."""
    mine, unfenced = set(taken), set[str]()
    others: list[PartitionOwner] = []
    for owner in owners:
        if owner.gateway == gateway:
            mine |= set(owner.partitions)
            unfenced |= set(owner.unfenced)
            continue
        kept = tuple(number for number in owner.partitions if number not in taken)
        if len(kept) < len(owner.partitions):
            # Also whom that owner was to fence: it may have died before it did.
            unfenced |= {owner.gateway, *owner.unfenced}
        if kept:
            others.append(msgspec.structs.replace(owner, partitions=kept))
    own = PartitionOwner(
        gateway=gateway,
        url=url,
        partitions=tuple(sorted(mine)),
        unfenced=tuple(sorted(unfenced)),
    )
    return (*others, own) if mine else tuple(others)


def with_fenced(
    owners: Sequence[PartitionOwner], fenced: Collection[str], *, gateway: str
) -> tuple[PartitionOwner, ...]:
    """The owners once this gateway has fenced these earlier ones."""
    return tuple(
        msgspec.structs.replace(
            owner, unfenced=tuple(each for each in owner.unfenced if each not in fenced)
        )
        if owner.gateway == gateway
        else owner
        for owner in owners
    )
