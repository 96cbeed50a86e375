"""Which GPUs of a machine a run's engines take, beside those of the trainer."""

from collections.abc import Collection, Sequence


def visible_gpus(installed: int, *, cuda_visible_devices: str | None) -> int:
    """How many of the installed GPUs a process sees, by the rules of CUDA_VISIBLE_DEVICES.

    Args:
        installed: GPUs of this machine.
        cuda_visible_devices: None if it is not set. As in CUDA, an entry below 0 ends the list.
    """
    if cuda_visible_devices is None:
        return installed
    count = 0
    for entry in cuda_visible_devices.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        count += 1
    return min(count, installed)


def least_free_bytes(listing: str, *, cuda_visible_devices: str | None) -> int | None:
    """Free memory of the visible GPU that has the least; None if none is visible.

    Args:
        listing: A line `<uuid>, <MiB>` for each GPU of the machine, in the order of their indices.
        cuda_visible_devices: Indices or beginnings of uuids; None if it is not set. As in CUDA, an
            entry that names no GPU ends the list.
    """
    rows = [line.split(", ") for line in listing.splitlines()]
    free_bytes = {uuid: int(free_mib) * 1024 * 1024 for uuid, free_mib in rows}
    if cuda_visible_devices is None:
        return min(free_bytes.values(), default=None)
    seen: list[int] = []
    for entry in map(str.strip, cuda_visible_devices.split(",")):
        found = [
            free
            for index, (uuid, free) in enumerate(free_bytes.items())
            if entry == str(index) or (entry.startswith("GPU-") and uuid.startswith(entry))
        ]
        if not found:
            break
        seen += found
    return min(seen, default=None)


def engine_gpus(
    sizes: Sequence[int],
    *,
    gpus: int,
    trainer_device: str,
    ranks: int,
    in_use: Collection[int] = (),
) -> tuple[int, ...]:
    """The first GPU of each engine; SGLang takes those that follow it.

    Args:
        sizes: GPUs of each engine.
        gpus: Visible GPUs, at least 1.
        trainer_device: `cpu`, `cuda` (one GPU for each rank, from the first) or `cuda:N`.
        ranks: Processes of the trainer.
        in_use: GPUs of engines that are up.

    Raises:
        ValueError: there are too few, or not enough beside one another.
    """
    family, _, index = trainer_device.partition(":")
    taken = range(0)
    if family == "cuda":
        taken = range(int(index), int(index) + 1) if index else range(ranks)
    used = {*taken, *in_use}
    firsts: list[int] = []
    for size in sizes:
        first = next((gpu for gpu in range(gpus) if _are_free(gpu, size, used, gpus=gpus)), None)
        if first is None and in_use:
            raise ValueError(
                f"this machine shows {gpus} GPUs, of which the run's engines have {len(in_use)} "
                f"and a trainer on FORGEMQ_TRAINER_DEVICE={trainer_device} {len(taken)}; another "
                f"lane needs {sum(sizes)}, those of one engine beside one another: remove a lane, "
                "or name an engine that runs elsewhere with --engine"
            )
        if first is None:
            raise ValueError(
                f"this machine shows {gpus} GPUs; the run's {len(sizes)} engines need "
                f"{sum(sizes)}, those of one engine beside one another, and a trainer on "
                f"FORGEMQ_TRAINER_DEVICE={trainer_device} takes {len(taken)} more: lower log.lanes "
                "or lanes.tensor_parallel, set FORGEMQ_TRAINER_DEVICE=cpu, name engines that run "
                "elsewhere with FORGEMQ_ENGINE_URL, or hide the GPUs with CUDA_VISIBLE_DEVICES=-1"
            )
        used |= set(range(first, first + size))
        firsts.append(first)
    return tuple(firsts)


def _are_free(first: int, size: int, used: set[int], *, gpus: int) -> bool:
    return first + size <= gpus and used.isdisjoint(range(first, first + size))
