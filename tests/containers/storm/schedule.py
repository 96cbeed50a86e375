"""What goes wrong in a run, by its number: which fault, whom it hits, after which step, how long.

The same seed is the same schedule. Who is hit is dealt like cards: of seeds in a row each takes the
next ones, so that a few seeds hit everybody.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar

from msgspec import Struct

from forgemq_bus.kafka_connection import KafkaConnection
from forgemq_bus.kafka_writer import TRANSACTION_TIMEOUT_MS
from forgemq_contracts.lanes import LANE_LAPSE_MS
from forgemq_gateway.core.gateways import LAPSE_S

Kind = Literal["kill", "pause", "cut", "disconnect", "full_disk", "clock_step"]
Card = TypeVar("Card")

BROKER = "kafka-0/kafka"
SERVICES = (
    "gateway-0/gateway",
    "scheduler-0/scheduler",
    "inference-0/inference",
    "trainer-0/trainer",
    "reward-0/reward",
    "merger-0/merger",
    "auditor-0/auditor",
    "console-0/console",
    "agents-0/agents",
    "run-0/end",
)
"""Python processes, whose clock a library can step."""

CONTAINERS = (*SERVICES, "inference-0/engine", BROKER)
PODS = tuple(sorted({name.split("/")[0] for name in CONTAINERS}))
LINKS = (
    *((pod, "kafka-0") for pod in PODS if pod not in {"agents-0", "kafka-0"}),
    ("agents-0", "gateway-0"),
    ("inference-0", "trainer-0"),
)
"""Pods that send each other something: only there a cut is felt."""

CLOCK_STEPS_S = (45, -45, 3600, -3600)
"""More than an episode's lease, and as much as a wrong time zone."""

KINDS: tuple[Kind, ...] = (
    "kill",
    "kill",
    "kill",
    "pause",
    "cut",
    "disconnect",
    "full_disk",
    "clock_step",
)
"""Of each run, in an order that its seed draws."""

STEPS = len(KINDS) + 2
"""The last fault is over before the run is, unless steps go on quickly beside it."""

EPISODE_LEASE_S = 30.0
"""As the overlay's run file has it: an episode of a silent agent is somebody else's then."""

LEASE_S_MAX = max(
    EPISODE_LEASE_S,
    KafkaConnection(bootstrap="kafka:9092").session_timeout_s,
    TRANSACTION_TIMEOUT_MS / 1000,
    LANE_LAPSE_MS / 1000,
    LAPSE_S,
)
SECONDS: dict[Kind, tuple[float, float]] = {
    "kill": (0, 10),
    "pause": (LEASE_S_MAX + 2, LEASE_S_MAX + 12),
    "cut": (5, 40),
    "disconnect": (5, 40),
    "full_disk": (10, 40),
    "clock_step": (10, 20),
}
"""How long the shortest and the longest fault of a kind takes."""


class Fault(Struct, frozen=True, kw_only=True):
    """One thing that goes wrong.

    Attributes:
        after_step: It begins when this step is trained.
        whom: pod/container; a pod if its network is cut.
        other: The pod on the other side of a cut, else "".
        for_s: Until it is undone.
        step_s: By how much a clock jumps, and back at the end.
    """

    kind: Kind
    after_step: int
    whom: str
    other: str = ""
    for_s: float
    step_s: int = 0

    def __str__(self) -> str:
        """One line for a person."""
        what = {
            "kill": f"kill -9 {self.whom}, started again",
            "pause": f"pause {self.whom}",
            "cut": f"drop all packets between {self.whom} and {self.other}",
            "disconnect": f"take {self.whom} off the network",
            "full_disk": f"fill the disk of {self.whom}",
            "clock_step": f"step the clock of {self.whom} by {self.step_s:+} s, restarts included,",
        }[self.kind]
        after = "after" if self.kind == "kill" else "for"
        return f"after step {self.after_step}: {what} {after} {self.for_s:.0f} s"


def schedule(seed: int) -> tuple[Fault, ...]:
    """The faults of a run, in their order."""
    kinds = _shuffled(list(enumerate(KINDS)), salt=f"order {seed}")
    kills = iter(dealt(CONTAINERS, seed, count=KINDS.count("kill"), salt="kill"))
    return tuple(
        _fault(kind, seed, after_step=step, name=f"{number}", kills=kills)
        for step, (number, kind) in enumerate(kinds)
    )


def dealt(cards: Sequence[Card], seed: int, *, count: int = 1, salt: str) -> tuple[Card, ...]:
    """The next cards of an endless row of shuffled decks, of which each seed takes as many."""
    places = range(seed * count, (seed + 1) * count)
    return tuple(
        _shuffled(cards, salt=f"{salt} {place // len(cards)}")[place % len(cards)]
        for place in places
    )


def _fault(kind: Kind, seed: int, *, after_step: int, name: str, kills: Iterator[str]) -> Fault:
    shortest_s, longest_s = SECONDS[kind]
    for_s = shortest_s + (longest_s - shortest_s) * _fraction(f"seconds {seed} {name}")
    whom, other, step_s = "", "", 0
    match kind:
        case "kill":
            whom = next(kills)
        case "pause":
            (whom,) = dealt(CONTAINERS, seed, salt=kind)
        case "cut":
            ((whom, other),) = dealt(LINKS, seed, salt=kind)
        case "disconnect":
            (whom,) = dealt(PODS, seed, salt=kind)
        case "full_disk":
            whom = BROKER
        case "clock_step":
            (whom,) = dealt(SERVICES, seed, salt=kind)
            (step_s,) = dealt(CLOCK_STEPS_S, seed, salt="step")
    return Fault(
        kind=kind, after_step=after_step, whom=whom, other=other, for_s=for_s, step_s=step_s
    )


def _shuffled(cards: Sequence[Card], *, salt: str) -> list[Card]:
    return sorted(cards, key=lambda card: _fraction(f"{salt} {card}"))


def _fraction(text: str) -> float:
    """From 0 to below 1, the same for the same text on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48
