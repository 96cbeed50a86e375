"""The SGLang servers of a run's lanes: which options, GPUs and ports each of them has."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from forgemq_contracts.lane_engines import (
    EngineShape,
    LaneEngines,
    every_lane,
    is_paired,
    shapes_of,
)
from forgemq_contracts.lora import publishes_adapters
from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.core.config_fields import fields_of
from forgemq_launcher.core.engine_families import FamilyConfig, check_family, check_format
from forgemq_launcher.core.engine_spread import ModelSizes, check_spread
from forgemq_launcher.core.gpus import engine_gpus, visible_gpus
from forgemq_launcher.upkeep.engine_model import model_of_engines
from forgemq_launcher.upkeep.machine import MachineError, installed_gpus
from forgemq_settings.user_code import for_user_code
from forgemq_sglang_cpu.adapters import EngineAdapters
from forgemq_sglang_cpu.options import EngineOptions, is_mixture
from forgemq_sglang_cpu.pair import EXPERTS_REFUSAL, Role
from forgemq_sglang_cpu.pool import EnginePool
from forgemq_sglang_cpu.server import EngineServer


class LaneServers(NamedTuple):
    """The servers of one lane: one that serves it, and one that reads contexts for that one."""

    serving: EngineServer
    prefill: EngineServer | None = None
    gpus: frozenset[int] = frozenset()
    """Numbers of those that both take, among the GPUs that are visible; none on a CPU."""


def servers(
    configuration: RunConfiguration,
    *,
    folder: Path,
    environ: Mapping[str, str],
    addresses: Sequence[tuple[str, int]],
) -> tuple[LaneServers, ...]:
    """The servers of each lane of the run; not started.

    Args:
        configuration: Of the run.
        folder: For logs, for K/V that engines share, and for a model that `write_engine_model`
            wrote.
        environ: As for `options_of_engines`.
        addresses: Hosts and ports, `addresses_count` of them.

    Raises:
        MachineError: the machine has GPUs, but too few for the engines; or it cannot have this
            pool, or these lanes.
    """
    return _servers(configuration, 0, folder=folder, environ=environ, addresses=addresses)


def _servers(
    configuration: RunConfiguration,
    lane_first: int,
    *,
    folder: Path,
    environ: Mapping[str, str],
    addresses: Sequence[tuple[str, int]],
    in_use: Collection[int] = (),
) -> tuple[LaneServers, ...]:
    """As `servers`; the lanes of the configuration have the numbers from `lane_first` on."""
    options = iter(_all_options(configuration, folder=folder, environ=environ, in_use=in_use))
    left = iter(addresses)
    model = str(model_of_engines(configuration, folder=folder))
    make = partial(_server, model, folder=folder, environ=environ)
    return tuple(
        _lane_servers(lane, engines, make, options=options, addresses=left)
        for lane, engines in enumerate(_lanes(configuration), lane_first)
    )


def _all_options(
    configuration: RunConfiguration,
    *,
    folder: Path,
    environ: Mapping[str, str],
    in_use: Collection[int],
) -> tuple[EngineOptions, ...]:
    _check_pairs(configuration)
    _check_spread(configuration)
    options = options_of_engines(
        configuration, gpus=installed_gpus(), environ=environ, in_use=in_use
    )
    check_quantization(configuration, options)
    _check_family(configuration, options)
    return with_pool(options, configuration, own_folder=folder / "pool")


def _lane_servers(
    lane: int,
    engines: LaneEngines,
    make: "_MakeServer",
    *,
    options: Iterator[EngineOptions],
    addresses: Iterator[tuple[str, int]],
) -> LaneServers:
    """The servers of one lane, of the options and addresses that come next."""
    prefill, gpus = None, frozenset[int]()
    if is_paired(engines):
        address, bootstrap_port = next(addresses), next(addresses)[1]
        own = msgspec.structs.replace(next(options), bootstrap_port=bootstrap_port)
        prefill, gpus = make(f"lane-{lane}-prefill", own, address), _gpus(own)
    own = next(options)
    serving = make(f"lane-{lane}", own, next(addresses))
    return LaneServers(serving, prefill, gpus=gpus | _gpus(own))


def _gpus(options: EngineOptions) -> frozenset[int]:
    if not options.has_gpu:
        return frozenset()
    return frozenset(range(options.gpu_first, options.gpu_first + options.tensor_parallel))


_MakeServer: TypeAlias = Callable[[str, EngineOptions, tuple[str, int]], EngineServer]


def _server(
    model: str,
    name: str,
    options: EngineOptions,
    address: tuple[str, int],
    *,
    folder: Path,
    environ: Mapping[str, str],
) -> EngineServer:
    host, port = address
    return EngineServer(
        model,
        folder / name,
        port=port,
        options=options,
        host=host,
        inherited=for_user_code(environ),  # An engine needs no credentials, and can be read.
    )


def addresses_count(configuration: RunConfiguration) -> int:
    """Ports that the run's servers need."""
    return sum(map(_addresses_count, _lanes(configuration)))


def added_addresses_count(lane: int, configuration: RunConfiguration) -> int:
    """Ports that the servers of a lane need which is added while the run is up."""
    return addresses_count(alone(lane, configuration))


def added_servers(
    lane: int,
    configuration: RunConfiguration,
    *,
    folder: Path,
    environ: Mapping[str, str],
    addresses: Sequence[tuple[str, int]],
    in_use: Collection[int] = (),
) -> LaneServers:
    """The servers of a lane that is added while the run is up, as `servers` makes them.

    Args:
        lane: Its number.
        configuration: Of the run.
        folder: As for `servers`.
        environ: As for `servers`.
        addresses: Hosts and ports, `added_addresses_count` of them.
        in_use: GPUs of the engines that are up. Lanes that were removed, or whose engines run
            elsewhere, have none of this machine.

    Raises:
        MachineError: there is no GPU for another engine, or none for this pool.
    """
    (added,) = _servers(
        alone(lane, configuration),
        lane,
        folder=folder,
        environ=environ,
        addresses=addresses,
        in_use=in_use,
    )
    return added


def alone(lane: int, configuration: RunConfiguration) -> RunConfiguration:
    """The configuration with this lane's engines and no others.

    A lane beyond those with which the run begins is like the last one of its file.
    """
    lanes = every_lane(configuration.lanes)
    own = tuple(msgspec.structs.replace(each, count=1) for each in (*lanes[lane:], *lanes[-1:])[:1])
    layout = msgspec.structs.replace(configuration.log, lanes=1, lanes_max=None)
    return msgspec.structs.replace(configuration, log=layout, lanes=own)


def options_of_engines(
    configuration: RunConfiguration,
    *,
    gpus: int,
    environ: Mapping[str, str],
    in_use: Collection[int] = (),
) -> tuple[EngineOptions, ...]:
    """Start options of each engine, lane 0 first, of a pair prefill first.

    Args:
        configuration: Says which engines and how many trainer ranks there are.
        gpus: Installed on this machine.
        environ: May hide some of them, and says where the trainer computes.
        in_use: Of the visible ones, those of engines that are up.

    Raises:
        MachineError: there are GPUs, but too few.
    """
    # No context limit is given, so the model's own holds: SGLang reserves a few tokens of its
    # limit, while gateway and inference enforce the run's limit to the token.
    seen = visible_gpus(gpus, cuda_visible_devices=environ.get("CUDA_VISIBLE_DEVICES"))
    usual = _usual_options(configuration)
    engines = [
        msgspec.structs.replace(usual, role=role, **_options_of_shape(shape))
        for lane in _lanes(configuration)
        for role, shape in zip(_roles(lane), shapes_of(lane), strict=True)
    ]
    if seen == 0:
        return tuple(engines)
    try:
        firsts = engine_gpus(
            [options.tensor_parallel for options in engines],
            gpus=seen,
            trainer_device=environ.get("FORGEMQ_TRAINER_DEVICE", "cpu"),
            ranks=configuration.trainer.world_size,
            in_use=in_use,
        )
    except ValueError as error:
        raise MachineError(str(error)) from error
    return tuple(
        msgspec.structs.replace(options, has_gpu=True, gpu_first=first)
        for options, first in zip(engines, firsts, strict=True)
    )


def _lanes(configuration: RunConfiguration) -> tuple[LaneEngines, ...]:
    return every_lane(configuration.lanes) or (LaneEngines(),) * configuration.log.lanes


def _roles(lane: LaneEngines) -> tuple[Role, ...]:
    return ("prefill", "decode") if is_paired(lane) else ("unified",)


def _options_of_shape(shape: EngineShape) -> dict[str, object]:
    return {
        "tensor_parallel": shape.tensor_parallel,
        "expert_parallel": shape.expert_parallel,
        "attention_data_parallel": shape.attention_data_parallel,
        "extra": shape.flags,
    }


def _check_pairs(configuration: RunConfiguration) -> None:
    if any(map(is_paired, configuration.lanes)) and _is_mixture(configuration):
        raise MachineError(
            f"lanes.prefill must be left out for a mixture of experts: {EXPERTS_REFUSAL}"
        )


def check_quantization(configuration: RunConfiguration, engines: Sequence[EngineOptions]) -> None:
    """Refuse a format that no test has tried, or that an engine on a CPU cannot compute.

    Raises:
        MachineError: names the field.
    """
    named = configuration.model.engine_quantization
    try:
        check_format(_sizes(configuration).model_type, named)
    except ValueError as error:
        raise MachineError(str(error)) from error
    is_on_cpu = not all(options.has_gpu for options in engines)
    if named != "none" and is_on_cpu and _is_mixture(configuration):
        raise MachineError(
            f"model.engine_quantization must be none for a mixture of experts on a CPU, got "
            f"{named}: there its experts run in full precision only"
        )


def _check_spread(configuration: RunConfiguration) -> None:
    if _model_config(configuration) is None:
        return
    sizes = _sizes(configuration)
    has_blocks = configuration.model.engine_quantization == "fp8_blocks"
    for shape in (shape for lane in configuration.lanes for shape in shapes_of(lane)):
        try:
            check_spread(shape, sizes, has_blocks=has_blocks)
        except ValueError as error:
            raise MachineError(str(error)) from error


def _check_family(configuration: RunConfiguration, engines: Sequence[EngineOptions]) -> None:
    config = _model_config(configuration)
    if config is None:
        return
    try:
        check_family(
            fields_of(config, FamilyConfig),
            context_tokens_max=configuration.model.context_tokens_max,
            has_gpu=all(options.has_gpu for options in engines),
        )
    except ValueError as error:
        raise MachineError(str(error)) from error


def _sizes(configuration: RunConfiguration) -> ModelSizes:
    config = _model_config(configuration)
    try:
        return ModelSizes() if config is None else fields_of(config, ModelSizes)
    except ValueError as error:
        raise MachineError(str(error)) from error


def _is_mixture(configuration: RunConfiguration) -> bool:
    config = _model_config(configuration)
    return config is not None and is_mixture(config)


def _model_config(configuration: RunConfiguration) -> bytes | None:
    """The model's config.json; a model without it is refused when its engine starts."""
    path = Path(configuration.model.path) / "config.json"
    return path.read_bytes() if path.is_file() else None


def _usual_options(configuration: RunConfiguration) -> EngineOptions:
    """What the run asks of each of its engines, on any machine."""
    lora = configuration.lora
    if lora is not None and publishes_adapters(lora):
        return EngineOptions(adapters=EngineAdapters(rank=lora.rank, targets=lora.targets))
    if configuration.speculation is None:
        return EngineOptions()
    speculation = configuration.speculation
    return EngineOptions(
        head=speculation.head, draft_model=speculation.model, draft_steps=speculation.steps
    )


def with_pool(
    lane_options: tuple[EngineOptions, ...], configuration: RunConfiguration, *, own_folder: Path
) -> tuple[EngineOptions, ...]:
    """The options with the run's pool, if it has one.

    Args:
        lane_options: Without a pool.
        configuration: Of the run.
        own_folder: For K/V if the run's file names no folder.

    Raises:
        MachineError: engines on a CPU cannot use this storage.
    """
    pool = configuration.pool
    if pool is None:
        return lane_options
    if pool.storage != "file" and not all(options.has_gpu for options in lane_options):
        raise MachineError(
            f"pool.storage must be file for engines on a CPU, got {pool.storage}: SGLang's "
            "clients of other storages need a GPU"
        )
    folder = pool.folder or str(own_folder)
    engine_pool = EnginePool(
        storage=pool.storage,
        folder=folder if pool.storage == "file" else "",
        folder_gb_max=pool.folder_gb_max,
        extra_config=pool.extra_config,
        page_tokens=pool.page_tokens,
        host_gb=pool.host_gb,
        prefetch=pool.prefetch,
    )
    return tuple(msgspec.structs.replace(options, pool=engine_pool) for options in lane_options)


def _addresses_count(engines: LaneEngines) -> int:
    """Ports of one lane's servers: one each, and of a prefill engine another one."""
    return 3 if is_paired(engines) else 1
