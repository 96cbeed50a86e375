"""Two SGLang servers as one engine of a lane: one reads contexts (prefill), the other samples.

Both get every request at the same time. Prefill computes the context's K/V and the first token and
sends them to decode, whose answer is the request's. What fails on either fails the attempt.

New weights reach both inside one pause. SGLang does not name the weights of K/V that is on its way,
so nothing may be on its way when the pause begins: requests that come meanwhile wait here, prefill
finishes what it has, and decode retracts what it samples. After the pause decode has prefill read
those again, under the new weights.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import msgspec

from forgemq_contracts.engine_report import ModelInfo
from forgemq_contracts.weight_buckets import TensorSpec
from forgemq_contracts.weights import Rendezvous
from forgemq_inference.core.engine_answer import EngineAnswer
from forgemq_inference.core.engine_load import EngineCounters, summed
from forgemq_inference.core.read_back import RankChecksums
from forgemq_inference.core.weights import BROKEN_NAME
from forgemq_inference.engine import (
    BucketPlace,
    Engine,
    EngineError,
    EngineRefusedError,
    EngineUnreachableError,
    Listener,
    Selector,
    ServerInfo,
    TensorLoad,
)
from forgemq_shell.interruption import wait_at_most

Value = TypeVar("Value")

_HANDOVER_TIMEOUT_S = 10.0
"""Agents see it as delay; a context that takes longer is aborted and sent again."""


class EnginePair:
    """A prefill and a decode engine with the methods of one `Engine`.

    Lifecycle: both engines are open; `server_info` comes before the first `generate` and
    `join_group`, since it learns how the two reach each other and how many processes they have.
    """

    def __init__(self, *, prefill: Engine, decode: Engine) -> None:
        """Ask nothing yet."""
        self._prefill = prefill
        self._decode = decode
        self._bootstrap: dict[str, object] = {}
        self._decode_ranks = 1
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._reading: set[str] = set()
        self._nothing_read = asyncio.Event()
        self._nothing_read.set()

    @property
    def url(self) -> str:
        """Address of the decode engine, whose answers count."""
        return self._decode.url

    async def generate(
        self, body: Mapping[str, Any], *, timeout_s: float, listener: Listener | None = None
    ) -> EngineAnswer:
        """Generate one completion; as `Engine.generate`, and waits while new weights come."""
        left_s = await self._wait_to_read(timeout_s)
        rid = str(body["rid"])
        both = {**body, **self._bootstrap, "bootstrap_room": room_of(rid)}
        try:
            return await self._generate(both, timeout_s=left_s, listener=listener)
        except EngineError:
            # The other engine may still work on it, and waits for K/V that does not come.
            with suppress(EngineError):
                await self.abort(rid)
            raise

    async def _wait_to_read(self, timeout_s: float) -> float:
        """Wait until new weights are there; returns the seconds that are left, above 0.

        Raises:
            EngineUnreachableError: none are.
        """
        deadline_s, left_s = time.monotonic() + timeout_s, 0.0
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._may_read.wait()
            left_s = deadline_s - time.monotonic()
        # aiohttp takes 0, and less, for no deadline at all.
        if left_s <= 0:
            raise EngineUnreachableError(f"paused for more than {timeout_s:.0f} s")
        return left_s

    async def _generate(
        self, body: dict[str, Any], *, timeout_s: float, listener: Listener | None
    ) -> EngineAnswer:
        sampling = asyncio.ensure_future(
            self._decode.generate(body, timeout_s=timeout_s, listener=listener)
        )
        try:
            async with self._noted_reading(str(body["rid"])):
                read = await _first_failure_or(
                    self._prefill.generate({**body, "stream": False}, timeout_s=timeout_s), sampling
                )
            # Tokens sampled from K/V that prefill did not finish are no answer.
            return read if _is_aborted(read) else await sampling
        finally:
            await _ended(sampling)

    @asynccontextmanager
    async def _noted_reading(self, rid: str) -> AsyncIterator[None]:
        self._reading.add(rid)
        self._nothing_read.clear()
        try:
            yield
        finally:
            self._reading.discard(rid)
            if not self._reading:
                self._nothing_read.set()

    async def abort(self, rid: str) -> None:
        """End one request on both; decode first, so that it samples nothing from a part."""
        await _in_turn(lambda engine: engine.abort(rid), self._decode, self._prefill)

    async def abort_all(self) -> None:
        """End every request of both, also those of other clients."""
        await _in_turn(lambda engine: engine.abort_all(), self._decode, self._prefill)

    async def check_health(self, *, timeout_s: float) -> None:
        """Return if the main processes of both answer."""
        await self._both(lambda engine: engine.check_health(timeout_s=timeout_s))

    async def model_info(self) -> ModelInfo:
        """Ask which weights are loaded: `broken` unless both name the same."""
        prefill, decode = await self._both(lambda engine: engine.model_info())
        if prefill.weight_version != decode.weight_version:
            return ModelInfo(BROKEN_NAME)
        is_same = prefill.model_path == decode.model_path
        return decode if is_same else ModelInfo(decode.weight_version)

    async def counters(self) -> EngineCounters:
        """What prefill has read and has to read; steps, memory and use of decode."""
        prefill, decode = await self._both(lambda engine: engine.counters())
        return msgspec.structs.replace(
            summed([prefill, decode]),
            num_used_tokens=decode.num_used_tokens,
            max_total_num_tokens=decode.max_total_num_tokens,
        )

    async def server_info(self) -> ServerInfo:
        """Ask for limits and options: of each limit the smaller, and all processes of both.

        Raises:
            EngineRefusedError: the servers are no pair, or one records expert routes.
        """
        prefill, decode = await self._both(lambda engine: engine.server_info())
        check_pair(prefill, decode)
        self._decode_ranks = decode.tp_size
        self._bootstrap = {
            "bootstrap_host": urlsplit(self._prefill.url).hostname,
            "bootstrap_port": prefill.disaggregation_bootstrap_port,
        }
        return msgspec.structs.replace(
            decode,
            max_total_num_tokens=min(prefill.max_total_num_tokens, decode.max_total_num_tokens),
            max_req_input_len=min(prefill.max_req_input_len, decode.max_req_input_len),
            tp_size=prefill.tp_size + decode.tp_size,
            hicache_storage_backend=prefill.hicache_storage_backend,
            disaggregation_mode=None,
        )

    async def pause(self, *, timeout_s: float) -> None:
        """Stop both with no K/V on its way; running requests keep their tokens.

        A context that is not read in time is aborted: its attempt fails. If K/V is on its way even
        then, all requests are.

        Raises:
            EngineRefusedError: requests stay in the engines even then.
        """
        self._may_read.clear()
        if await self._are_quiet_when_paused(timeout_s=timeout_s):
            return
        await self._resume_both(timeout_s=timeout_s)
        await self.abort_all()
        await self._both(lambda engine: engine.flush(wait_s=_HANDOVER_TIMEOUT_S))
        await self._pause_both(timeout_s=timeout_s)

    async def _are_quiet_when_paused(self, *, timeout_s: float) -> bool:
        """Pause both once prefill is idle; False if K/V is on its way nevertheless."""
        await self._finish_reading()
        try:
            # Also what decode itself sent there, to have it read again after an earlier pause.
            await self._prefill.flush(wait_s=_HANDOVER_TIMEOUT_S)
            await self._pause_both(timeout_s=timeout_s)
            await self._decode.flush(wait_s=0.0)
        except EngineRefusedError:
            return False
        return True

    async def _finish_reading(self) -> None:
        """Wait until prefill has answered what it was sent; abort what takes too long."""
        await wait_at_most(self._nothing_read, _HANDOVER_TIMEOUT_S)
        for rid in tuple(self._reading):
            await self.abort(rid)

    async def _pause_both(self, *, timeout_s: float) -> None:
        await self._prefill.pause(timeout_s=timeout_s)
        await self._decode.pause(timeout_s=timeout_s)

    async def resume(self, *, timeout_s: float) -> None:
        """Go on generating and let waiting requests in; harmless if nothing was paused."""
        await self._resume_both(timeout_s=timeout_s)
        self._may_read.set()

    async def _resume_both(self, *, timeout_s: float) -> None:
        """Go on with what the engines have; new requests wait."""
        await self._decode.resume(timeout_s=timeout_s)
        await self._prefill.resume(timeout_s=timeout_s)

    async def name_weights(self, name: str) -> None:
        """Change the name of the weights of both, not the weights."""
        await self._both(lambda engine: engine.name_weights(name))

    async def join_group(self, rendezvous: Rendezvous, *, timeout_s: float) -> None:
        """Form one process group with the trainer as rank 0: decode's processes, then prefill's."""
        await _settled(
            self._prefill.join_group(
                rendezvous,
                rank_first=rendezvous.rank_first + self._decode_ranks,
                timeout_s=timeout_s,
            ),
            self._decode.join_group(rendezvous, timeout_s=timeout_s),
        )

    async def leave_group(self, group_name: str) -> None:
        """Leave a process group; raises EngineRefusedError if one of them is not in it."""
        await self._both(lambda engine: engine.leave_group(group_name))

    async def begin_update(self, selector: Selector, *, timeout_s: float) -> None:
        """Open the session that an update needs, on both."""
        await self._both(lambda engine: engine.begin_update(selector, timeout_s=timeout_s))

    async def end_update(self, *, timeout_s: float) -> None:
        """Close the session of both; raises EngineRefusedError if one has no open one."""
        await self._both(lambda engine: engine.end_update(timeout_s=timeout_s))

    async def receive_bucket(
        self,
        bucket: Sequence[TensorSpec],
        *,
        group_name: str,
        place: BucketPlace,
        timeout_s: float,
    ) -> None:
        """Receive one flat broadcast from rank 0 on both; as `Engine.receive_bucket`."""
        await self._both(
            lambda engine: engine.receive_bucket(
                bucket, group_name=group_name, place=place, timeout_s=timeout_s
            )
        )

    async def tensor_load(self, *, timeout_s: float) -> TensorLoad:
        """What loads the buckets of one update on both; as `Engine.tensor_load`."""
        prefill, decode = await self._both(lambda engine: engine.tensor_load(timeout_s=timeout_s))

        async def load(payload: bytes, place: BucketPlace) -> None:
            await _settled(prefill(payload, place), decode(payload, place))

        return load

    async def load_folder(self, folder: str, *, name: str, timeout_s: float) -> None:
        """Load weights on both from a folder that both can read, and flush their caches."""
        await self._both(lambda engine: engine.load_folder(folder, name=name, timeout_s=timeout_s))

    async def checksums(self, leave_out: Sequence[str]) -> list[RankChecksums]:
        """Checksums of the parameters of each process of both; as `Engine.checksums`."""
        prefill, decode = await self._both(lambda engine: engine.checksums(leave_out))
        return prefill + decode

    async def _both(self, call: Callable[[Engine], Awaitable[Value]]) -> tuple[Value, Value]:
        """What prefill and decode answer to a call at the same time."""
        return await _settled(call(self._prefill), call(self._decode))


LaneEngine: TypeAlias = Engine | EnginePair
"""What serves a lane."""


def room_of(rid: str) -> int:
    """The number under which the two engines know a request: 63 bits that follow from its id."""
    return int.from_bytes(hashlib.blake2b(rid.encode(), digest_size=8).digest()) >> 1


def check_pair(prefill: ServerInfo, decode: ServerInfo) -> None:
    """Refuse two servers that cannot serve a lane together.

    Raises:
        EngineRefusedError: says what is wrong with which.
    """
    for role, server in (("prefill", prefill), ("decode", decode)):
        if server.disaggregation_mode != role:
            raise EngineRefusedError(
                f"the {role} engine was started with --disaggregation-mode "
                f"{server.disaggregation_mode}, it must be {role}"
            )
        if server.enable_return_routed_experts:
            raise EngineRefusedError(
                f"the {role} engine was started with --enable-return-routed-experts: prefill "
                "records the routes of the first token, and SGLang sends them to no decode engine"
            )
    for option, of_prefill, of_decode in (
        ("--speculative-algorithm", prefill.speculative_algorithm, decode.speculative_algorithm),
        ("--quantization", prefill.quantization, decode.quantization),
    ):
        if of_prefill != of_decode:
            raise EngineRefusedError(
                f"prefill and decode engine must have the same {option}, got {of_prefill} and "
                f"{of_decode}"
            )
    if decode.hicache_storage_backend is not None:
        raise EngineRefusedError(
            "the decode engine was started with --hicache-storage-backend "
            f"{decode.hicache_storage_backend}: prefill reads contexts, so the pool is its own"
        )


async def _first_failure_or(
    reading: Awaitable[EngineAnswer], sampling: "asyncio.Future[EngineAnswer]"
) -> EngineAnswer:
    """Prefill's answer; raises what decode fails with if that comes first."""
    read = asyncio.ensure_future(reading)
    try:
        await asyncio.wait((read, sampling), return_when=asyncio.FIRST_COMPLETED)
        if not read.done() and _is_aborted(sampling.result()):
            return sampling.result()
        return await read
    finally:
        await _ended(read)


async def _ended(call: "asyncio.Future[EngineAnswer]") -> None:
    """Cancel a call unless it has ended, and take its error, which another one has caused."""
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


def _is_aborted(answer: EngineAnswer) -> bool:
    return answer.meta_info.finish_reason.type == "abort"


async def _settled(prefill: Awaitable[Value], decode: Awaitable[Value]) -> tuple[Value, Value]:
    """Both results, once both have ended; an engine that is gone outweighs one that refuses."""
    results = await asyncio.gather(prefill, decode, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda each: isinstance(each, EngineRefusedError)):
        raise error
    first, second = results
    assert not isinstance(first, BaseException)
    assert not isinstance(second, BaseException)
    return first, second


async def _in_turn(call: Callable[[Engine], Awaitable[None]], *engines: Engine) -> None:
    """Ask each engine, also after one has failed; then raise the first failure."""
    failures: list[EngineError] = []
    for engine in engines:
        try:
            await call(engine)
        except EngineError as error:
            failures.append(error)
    if failures:
        raise failures[0]
