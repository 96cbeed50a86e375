"""The machines that a run is planned for: GPUs by their data sheets, and the rest of a node."""

import difflib
from collections.abc import Mapping

from msgspec import Struct


class MachinesError(ValueError):
    """No such machines; the text names the option and the rule."""


class Gpu(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU as its data sheet has it, and a usual node of 8 of them.

    Attributes:
        memory_bytes: Of the size that it is sold as; what is really free is a little more or less.
        memory_bytes_per_s: Peak of its own memory.
        flops: Peak of dense matrix products a second, by the dtype of a run's model.
        link_bytes_per_s: To the other GPUs of its node, in one direction.
        network_bytes_per_s: Its share of its node's network, in one direction.
        host_bytes: Memory of the node.
        disk_bytes: Local disks of the node.
        source: Where the numbers are from.
    """

    memory_bytes: int
    memory_bytes_per_s: float
    flops: Mapping[str, float]
    link_bytes_per_s: float
    network_bytes_per_s: float
    host_bytes: int
    disk_bytes: int
    source: str


TB = 10**12

GPUS: Mapping[str, Gpu] = {
    "h100": Gpu(
        memory_bytes=80 * 10**9,
        memory_bytes_per_s=3.35e12,
        flops={"bfloat16": 989.4e12, "float32": 66.9e12},
        link_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
        host_bytes=2 * TB,
        disk_bytes=30 * TB,
        source="data sheets of NVIDIA's H100 SXM and DGX H100",
    ),
    "h200": Gpu(
        memory_bytes=141 * 10**9,
        memory_bytes_per_s=4.8e12,
        flops={"bfloat16": 989.4e12, "float32": 66.9e12},
        link_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
        host_bytes=2 * TB,
        disk_bytes=30 * TB,
        source="data sheets of NVIDIA's H200 SXM and DGX H200",
    ),
    "b200": Gpu(
        memory_bytes=180 * 10**9,
        memory_bytes_per_s=8e12,
        flops={"bfloat16": 2250e12, "float32": 80e12},
        link_bytes_per_s=900e9,
        network_bytes_per_s=50e9,
        host_bytes=2 * TB,
        disk_bytes=30 * TB,
        source="data sheets of NVIDIA's HGX B200 and DGX B200",
    ),
}
"""FLOP/s are without sparsity. The network is one port of 400 Gb/s for each GPU."""

CPU = "cpu"

UTILISATION = 0.5
"""What the trainer reached of an H200's peak with torch's attention kernels (docs/tree_training.md,
On a GPU); with flash-attn-4 it was 0.57. Engines' prefill has not been measured."""

BANDWIDTH_SHARE = 0.7
"""Assumed, not measured."""


class Machines(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run is planned for.

    Attributes:
        gpu: Name of a GPU of the table; "cpu" for machines without one.
        gpus: Of each node.
        nodes: Alike.
        host_bytes: Memory of each node.
        disk_bytes: Of each node, for weights and checkpoints; 0 if it is not stated.
        utilisation: Share of the peak FLOP/s that matrix products reach.
        bandwidth_share: Share of the peak bandwidth that memory and links reach.
    """

    gpu: str
    gpus: int
    nodes: int
    host_bytes: int
    disk_bytes: int
    utilisation: float
    bandwidth_share: float

    @property
    def device(self) -> Gpu | None:
        """The GPU's numbers; None on machines without one."""
        return GPUS.get(self.gpu)


def gpu_named(name: str) -> Gpu | None:
    """The GPU of this name; None for `cpu`.

    Raises:
        MachinesError: the table has none.
    """
    if name == CPU:
        return None
    if name not in GPUS:
        known = (*GPUS, CPU)
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise MachinesError(f"--gpu: no such machine {name!r}{hint}; there are {', '.join(known)}")
    return GPUS[name]
