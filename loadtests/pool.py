"""What is faster on engines on a CPU: to fetch K/V from a pool, or to compute it again?

Two real engines share a folder. The first gets contexts that nobody has computed, the second the
same ones. Both sample one token. `demo` is the model of the demo. `larger` is a Qwen3 of 56 million
random parameters: what a token costs to compute grows faster with a model than its K/V.
"""

import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from larger_model import LARGER
from measurement import Measurement, parser_of
from msgspec import Struct
from real_engines import real_engines
from transformers import AutoConfig, AutoModelForCausalLM

from forgemq_inference.engine import Engine
from forgemq_sglang_cpu.options import EngineOptions
from forgemq_sglang_cpu.pool import EnginePool

_DEMO = Path(__file__).parents[1] / "deploy" / "demo" / "model"
_PAGE_TOKENS = 16
_CONTEXTS = 8
_TIMEOUT_S = 300.0
_WRITTEN_POLL_S = 1.0


class Case(Struct, frozen=True, kw_only=True):
    """A model, by what differs from the demo's, and the length of its contexts."""

    changes: dict[str, Any] = {}
    context_tokens: int


CASES = {
    "demo": Case(context_tokens=960),
    "larger": Case(changes=LARGER, context_tokens=1920),
}


async def measure(case: Case, model: Path, folder: Path) -> tuple[float, float, float]:
    """Tokens a second of computing and of fetching, and the share that was fetched."""
    contexts = [_context(number, case.context_tokens) for number in range(_CONTEXTS + 1)]
    pool = EnginePool(
        storage="file",
        folder=str(folder / "pool"),
        page_tokens=_PAGE_TOKENS,
        prefetch="wait_complete",
    )
    options = EngineOptions(pool=pool)
    async with real_engines(model, folder, count=2, options=options) as (first, second):
        # The first context of each engine also pays for what is compiled and opened once.
        computed_s = [await _seconds(first, context) for context in contexts][1:]
        pages = len(contexts) * case.context_tokens // _PAGE_TOKENS
        await asyncio.to_thread(_wait_written, folder / "pool", pages)
        fetched = [await _timed(second, context) for context in contexts][1:]
    return (
        case.context_tokens / statistics.median(computed_s),
        case.context_tokens / statistics.median(seconds for seconds, _ in fetched),
        statistics.mean(tokens for _, tokens in fetched) / case.context_tokens,
    )


def _context(number: int, tokens: int) -> list[int]:
    return [(index * (2 * number + 3)) % 690 + 5 for index in range(tokens)]


async def _seconds(engine: Engine, context: Sequence[int]) -> float:
    return (await _timed(engine, context))[0]


async def _timed(engine: Engine, context: Sequence[int]) -> tuple[float, int]:
    """Seconds of a request for one token, and how many tokens came from the pool."""
    sampling = {"temperature": 0, "max_new_tokens": 1}
    started_s = time.monotonic()
    answer = await engine.generate(
        {"input_ids": context, "sampling_params": sampling}, timeout_s=_TIMEOUT_S
    )
    tiers = answer.meta_info.cached_tokens_details
    return time.monotonic() - started_s, tiers.storage if tiers else 0


def _wait_written(folder: Path, pages: int) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while (written := len(list(folder.glob("*.bin")))) < pages:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the pool has {written} of {pages} pages")
        time.sleep(_WRITTEN_POLL_S)


def _model(case: Case, folder: Path) -> Path:
    if not case.changes:
        return _DEMO
    shutil.copytree(_DEMO, folder)
    config = AutoConfig.from_pretrained(_DEMO, **case.changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def main() -> int:
    """Measure the named cases, or all of them."""
    options = parser_of(__doc__ or "").parse_args()
    measurement = Measurement(
        name="pool", question="Is K/V fetched from a pool sooner than it is computed again?"
    )
    for name, case in CASES.items():
        if options.case and name not in options.case:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            model = _model(case, folder / "model")
            computed, fetched, share = asyncio.run(measure(case, model, folder))
        measurement.row(name, "computed_tokens_per_s", computed, "1/s")
        measurement.row(name, "fetched_tokens_per_s", fetched, "1/s")
        measurement.row(name, "fetched_share", share, "")
        measurement.row(name, "fetched_over_computed", fetched / computed, "x")
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
