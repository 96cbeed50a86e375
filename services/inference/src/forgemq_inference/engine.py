"""The HTTP side of one SGLang server (0.5.23); every call has a deadline."""

import base64
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import aiohttp
import msgspec

from forgemq_contracts.engine_report import EngineReport, ModelInfo, Positive
from forgemq_contracts.weight_buckets import TensorSpec
from forgemq_contracts.weights import Rendezvous
from forgemq_inference.core.engine_answer import EngineAnswer, EngineProgress
from forgemq_inference.core.engine_load import EngineCounters, summed
from forgemq_inference.core.read_back import RankChecksums

_STREAM_END = b"[DONE]"

Selector: TypeAlias = Literal["target", "draft"]
"""Which weights a session is for: the policy's, or those of the head that drafts for it."""

Decoded = TypeVar("Decoded", bound=msgspec.Struct)

_CONTROL_TIMEOUT_S = 30.0
"""For calls that change no weights: they take milliseconds, but wait for a decoding step."""
_LOADS_TIMEOUT_S = 1.0
"""SGLang answers this from memory; it is asked once a second."""
_MESSAGE_CHARACTERS_MAX = 300
"""Of an error's text in a record; SGLang may answer with a whole traceback."""
_BODY_AT_ONCE_BYTES_MAX = 2**20
"""aiohttp warns of larger ones: of a long context, and of the tensors of a head."""
_KEEPALIVE_S = 2.0
"""Below the 5 s after which the server closes idle connections: a request that reuses a connection
as it is being closed fails."""


class EngineError(Exception):
    """The engine did not do what it was asked."""


class EngineRefusedError(EngineError):
    """The engine answered with an error; the text says which and why."""


class EngineUnreadyError(EngineRefusedError):
    """The engine answered that it failed (HTTP 5xx): one that starts does, and later answers."""


class EngineUnreachableError(EngineError):
    """The engine did not answer: it is gone, or too slow."""


class EngineGoneError(EngineUnreachableError):
    """Its address takes no connection, or broke one: the server has ended, it seems."""


class Listener(Protocol):
    """Hears of the tokens of a generation while they are sampled."""

    def is_due(self) -> bool:
        """Whether it wants to hear now; what it does not hear is part of what comes later."""
        ...

    def tell(self, output_ids: list[int], /) -> None:
        """All tokens so far."""
        ...


class ServerInfo(EngineReport, frozen=True):
    """What /server_info says: limits in tokens, and options of the start."""

    context_length: Positive | None = None
    tp_size: Positive = 1
    attn_dp_size: Positive = 1
    enable_return_routed_experts: bool = False
    hicache_storage_backend: str | None = None
    device: str = "cpu"
    speculative_algorithm: str | None = None
    disaggregation_bootstrap_port: int | None = None


class BucketPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What part of an update a bucket is.

    Attributes:
        selector: Whose tensors.
        flushes: The engine drops its cache after this bucket: K/V of the policy's old weights.
        final_name: The weights' name after this bucket; None before the last one.
    """

    selector: Selector
    flushes: bool = False
    final_name: str | None = None

    def fields(self) -> dict[str, Any]:
        """As SGLang names them."""
        named = {} if self.final_name is None else {"weight_version": self.final_name}
        return {"selector": self.selector, "flush_cache": self.flushes, **named}


TensorLoad: TypeAlias = Callable[[bytes, BucketPlace], Awaitable[None]]
"""Loads the tensors of a bucket that the request itself holds; see `tensor_pickle.py`."""


class _Checked(msgspec.Struct, frozen=True):
    ranks: list[RankChecksums] = []


class _Loads(msgspec.Struct, frozen=True):
    loads: list[EngineCounters]


class _Success(msgspec.Struct, frozen=True):
    success: bool
    message: str = ""


class _LoadedAdapters(msgspec.Struct, frozen=True):
    success: bool
    loaded_adapters: dict[str, str] = {}


class Engine:
    """One engine at one address.

    Example:
        async with Engine("http://127.0.0.1:31000") as engine:
            await engine.generate(body, timeout_s=60.0)
    """

    def __init__(self, url: str) -> None:
        """Connect to nothing yet."""
        self.url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._answer = msgspec.json.Decoder(EngineAnswer)
        self._progress = msgspec.json.Decoder(EngineProgress)

    async def __aenter__(self) -> "Engine":
        """Open the connection pool."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection pool."""
        if self._session is not None:
            await self._session.close()

    async def generate(
        self, body: Mapping[str, Any], *, timeout_s: float, listener: Listener | None = None
    ) -> EngineAnswer:
        """Generate one completion; a `listener` needs a body that asks for a stream.

        Raises:
            EngineRefusedError: the engine does not take the request, or its answer is unreadable.
            EngineUnreachableError: no answer in time.
        """
        if listener is None:
            data = await self._request("POST", "/generate", body, timeout_s=timeout_s)
        else:
            data = await self._followed(body, listener, timeout_s=timeout_s)
        try:
            return self._answer.decode(data)
        except msgspec.MsgspecError as error:
            text = data[:_MESSAGE_CHARACTERS_MAX].decode(errors="replace")
            raise EngineRefusedError(f"/generate: unreadable answer: {error}: {text}") from error

    async def _followed(
        self, body: Mapping[str, Any], listener: Listener, *, timeout_s: float
    ) -> bytes:
        """The last event of a streamed generation, which is the whole answer or an error."""
        last = b""
        async with self._responding("POST", "/generate", body, timeout_s=timeout_s) as response:
            async for event in _events(response):
                if event == _STREAM_END:
                    return last
                last = event
                if listener.is_due():
                    with suppress(msgspec.MsgspecError):  # An error is the last event.
                        listener.tell(self._progress.decode(event).output_ids)
        raise EngineUnreachableError("/generate: the stream ended without its end")

    async def abort(self, rid: str) -> None:
        """End one request; its `generate` then returns with reason abort."""
        await self._request("POST", "/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        """End every request, also those of other clients."""
        await self._request("POST", "/abort_request", {"abort_all": True})

    async def check_health(self, *, timeout_s: float) -> None:
        """Return if the server's main process answers; generation may be paused."""
        await self._request("GET", "/health", None, timeout_s=timeout_s)

    async def model_info(self) -> ModelInfo:
        """Ask which weights are loaded."""
        return _decoded(await self._request("GET", "/model_info", None), ModelInfo)

    async def counters(self) -> EngineCounters:
        """Ask what the engine has done and has to do; of several schedulers, the sums."""
        data = await self._request(
            "GET", "/v1/loads?include=core", None, timeout_s=_LOADS_TIMEOUT_S
        )
        return summed(_decoded(data, _Loads).loads)

    async def server_info(self) -> ServerInfo:
        """Ask for the engine's limits and options."""
        return _decoded(await self._request("GET", "/server_info", None), ServerInfo)

    async def pause(self, *, timeout_s: float) -> None:
        """Stop generating; running requests keep their tokens and are computed again later."""
        body = {"mode": "retract"}
        await self._request("POST", "/pause_generation", body, timeout_s=timeout_s)

    async def resume(self, *, timeout_s: float) -> None:
        """Go on generating; harmless if generation was not paused."""
        await self._request("POST", "/continue_generation", {}, timeout_s=timeout_s)

    async def name_weights(self, name: str) -> None:
        """Change the name of the weights, not the weights."""
        body = {"new_version": name, "abort_all_requests": False}
        await self._succeed("/update_weight_version", body, timeout_s=_CONTROL_TIMEOUT_S)

    async def flush(self, *, wait_s: float) -> None:
        """Drop the cache once the engine has no request; a paused one may have retracted ones.

        Raises:
            EngineRefusedError: it has some even after `wait_s`.
        """
        path = f"/flush_cache?timeout={wait_s:g}"
        await self._request("POST", path, {}, timeout_s=wait_s + _CONTROL_TIMEOUT_S)

    async def join_group(
        self, rendezvous: Rendezvous, *, timeout_s: float, rank_first: int | None = None
    ) -> None:
        """Form the process group with the trainer as rank 0; by default with the lane's ranks."""
        body = {
            "master_address": rendezvous.host,
            "master_port": rendezvous.port,
            "rank_offset": rendezvous.rank_first if rank_first is None else rank_first,
            "world_size": rendezvous.world_size,
            "group_name": rendezvous.group_name,
            "backend": rendezvous.backend,
        }
        await self._succeed("/init_weights_update_group", body, timeout_s=timeout_s)

    async def leave_group(self, group_name: str) -> None:
        """Leave a process group; raises EngineRefusedError if the engine is not in it."""
        body = {"group_name": group_name}
        await self._succeed("/destroy_weights_update_group", body, timeout_s=_CONTROL_TIMEOUT_S)

    async def begin_update(self, selector: Selector, *, timeout_s: float) -> None:
        """Open the session that an update needs, over a process group or by tensors."""
        # Always named: SGLang's default loads the policy's tensors into the head as well.
        body = {"selector": selector}
        await self._succeed("/begin_weight_update", body, timeout_s=timeout_s)

    async def end_update(self, *, timeout_s: float) -> None:
        """Close the session; raises EngineRefusedError if there is no open one."""
        await self._succeed("/end_weight_update", {}, timeout_s=timeout_s)

    async def receive_bucket(
        self,
        bucket: Sequence[TensorSpec],
        *,
        group_name: str,
        place: BucketPlace,
        timeout_s: float,
    ) -> None:
        """Receive one flat broadcast from rank 0 and load the tensors in it.

        Args:
            bucket: Names, dtypes and shapes, in the order of their bytes.
            group_name: Process group to receive from.
            place: In the whole update.
            timeout_s: For the broadcast and the load.
        """
        body = place.fields() | {
            "names": [tensor.name for tensor in bucket],
            "dtypes": [tensor.dtype for tensor in bucket],
            "shapes": [tensor.shape for tensor in bucket],
            "group_name": group_name,
            "load_format": "flattened_bucket",
        }
        await self._succeed("/update_weights_from_distributed", body, timeout_s=timeout_s)

    async def tensor_load(self, *, timeout_s: float) -> TensorLoad:
        """What loads the buckets of one update, each within `timeout_s`."""
        # Each process of the engine takes a copy of its own.
        ranks = (await self.server_info()).tp_size

        async def load(payload: bytes, place: BucketPlace) -> None:
            text = base64.b64encode(payload).decode()
            body = place.fields() | {"serialized_named_tensors": [text] * ranks}
            await self._succeed("/update_weights_from_tensor", body, timeout_s=timeout_s)

        return load

    async def load_folder(self, folder: str, *, name: str, timeout_s: float) -> None:
        """Load weights from a folder that the engine can read, and flush the cache."""
        body = {
            "model_path": folder,
            "load_format": "safetensors",
            "weight_version": name,
            "flush_cache": True,
        }
        await self._succeed("/update_weights_from_disk", body, timeout_s=timeout_s)

    async def load_adapter(self, folder: str, *, name: str, timeout_s: float) -> dict[str, str]:
        """Load an adapter beside the model; returns what the engine says of all it has, by name."""
        body = {"lora_name": name, "lora_path": folder}
        data = await self._request("POST", "/load_lora_adapter", body, timeout_s=timeout_s)
        return _decoded(data, _LoadedAdapters).loaded_adapters

    async def unload_adapter(self, name: str) -> None:
        """Drop an adapter that no request was sent with; raises EngineRefusedError without it."""
        await self._request("POST", "/unload_lora_adapter", {"lora_name": name})

    async def checksums(self, leave_out: Sequence[str]) -> list[RankChecksums]:
        """Checksums of the policy's parameters, of each process of the engine.

        Args:
            leave_out: Parameters whose name has one of these in it are not read.
        """
        body = {"action": "checksum", "selector": "target", "skip_tensor_list": leave_out}
        data = await self._request("POST", "/weights_checker", body)
        return _decoded(data, _Checked).ranks

    async def _succeed(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> None:
        answer = _decoded(await self._request("POST", path, body, timeout_s=timeout_s), _Success)
        if not answer.success:
            raise EngineRefusedError(f"{path}: {answer.message[:_MESSAGE_CHARACTERS_MAX]}")

    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        timeout_s: float = _CONTROL_TIMEOUT_S,
    ) -> bytes:
        async with self._responding(method, path, body, timeout_s=timeout_s) as response:
            return await response.read()

    @asynccontextmanager
    async def _responding(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A successful response; what fails while it is read is an `EngineError` too."""
        assert self._session is not None, "an Engine is used inside `async with`"
        data = None if body is None else _data(msgspec.json.encode(body))
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=data,
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONTROL_TIMEOUT_S),
            ) as response:
                if response.status != 200:
                    content = await response.read()
                    text = content.decode(errors="replace")[:_MESSAGE_CHARACTERS_MAX]
                    refused = EngineUnreadyError if response.status >= 500 else EngineRefusedError
                    raise refused(f"{path}: HTTP {response.status}: {text}")
                yield response
        except TimeoutError as error:
            raise EngineUnreachableError(f"{path}: no answer within {timeout_s:.0f} s") from error
        except aiohttp.ClientError as error:
            is_gone = isinstance(error, aiohttp.ClientConnectionError)
            kind = EngineGoneError if is_gone else EngineUnreachableError
            raise kind(f"{path}: {type(error).__name__}: {error}") from error


def _data(encoded: bytes) -> bytes | io.BytesIO:
    """What aiohttp sends; of a large body a stream, so that the event loop is not blocked."""
    return io.BytesIO(encoded) if len(encoded) > _BODY_AT_ONCE_BYTES_MAX else encoded


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each event of a stream; one may be megabytes long."""
    held = bytearray()
    async for part in response.content.iter_any():
        searched = max(0, len(held) - 1)
        held += part
        while (end := held.find(b"\n\n", searched)) >= 0:
            yield bytes(held[:end]).removeprefix(b"data: ")
            del held[: end + 2]
            searched = 0


def _decoded(data: bytes, kind: type[Decoded]) -> Decoded:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise EngineRefusedError(f"unreadable {kind.__name__}: {error}") from error
