"""Makes an adapter the policy of an engine that is paused; the engine's base model stays."""

from pathlib import Path

from forgemq_inference.core.weights import BROKEN_NAME, weights_of_name
from forgemq_inference.engine import Engine, EngineRefusedError
from forgemq_inference.engine_pair import LaneEngine

FOLLOWED = "followed"
"""In an engine's answer: the adapter with which all of its requests go on. The hooks of sglang_cpu
say so, and have dropped the engine's K/V."""


async def load_adapter(
    engine: LaneEngine, folder: Path, *, adapter: str, name: str, timeout_s: float
) -> None:
    """Let the engine go on with an adapter, and drop the ones before it.

    The weights are named `broken` until all is done, and `name` then.

    Args:
        engine: Paused.
        folder: Of the adapter; the engine reads it.
        adapter: Its name in the engine, by which the engine's hooks know an adapter of the policy.
        name: Of the weights.
        timeout_s: For the load.

    Raises:
        EngineRefusedError: the engine cannot load it, or its requests would not go on with it.
    """
    if not isinstance(engine, Engine):
        raise EngineRefusedError(f"{engine.url}: an engine pair loads no adapters")
    await engine.name_weights(BROKEN_NAME)
    loaded = await _loaded(engine, folder, name=adapter, timeout_s=timeout_s)
    if loaded.get(FOLLOWED) != adapter:
        raise EngineRefusedError(
            f"{engine.url} would go on without the adapter {adapter} in requests that it has: it "
            "must be started by python -m forgemq_sglang_cpu or by a run"
        )
    for other in loaded:
        if other != adapter and weights_of_name(other) is not None:
            await engine.unload_adapter(other)
    await engine.name_weights(name)


async def _loaded(engine: Engine, folder: Path, *, name: str, timeout_s: float) -> dict[str, str]:
    try:
        return await engine.load_adapter(str(folder), name=name, timeout_s=timeout_s)
    except EngineRefusedError as refusal:
        try:
            # An attempt that broke off may have left it in the engine, whole or not.
            await engine.unload_adapter(name)
        except EngineRefusedError:
            raise refusal from None
        return await engine.load_adapter(str(folder), name=name, timeout_s=timeout_s)
