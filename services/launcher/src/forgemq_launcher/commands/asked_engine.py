"""Whether the server at an address is an SGLang engine that a run can have, by what it answers."""

import http.client
import urllib.error
import urllib.request
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from forgemq_contracts.engine_report import EngineReport, ModelInfo, size_refusal, start_refusal
from forgemq_contracts.run import Model
from forgemq_launcher.upkeep.named_engines import ANSWER_TIMEOUT_S, health_refusal

_Answer = TypeVar("_Answer", bound=Struct)


def engine_refusal(url: str, model: Model) -> str:
    """Why the run's lane could not use the server at this address; '' if it can.

    Folders are compared that this machine has: the engine's may be on another one.
    """
    if why := health_refusal(url):
        return f"{url} does not answer a health check: {why}"
    try:
        report = _answer(f"{url}/server_info", EngineReport)
        info = _answer(f"{url}/model_info", ModelInfo)
    except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
        return f"{url} must be an SGLang engine, and does not answer as one: {error}"
    return start_refusal(report, model, url=url) or size_refusal(
        _config_in(info.model_path), _config_in(model.path), url=url
    )


def _answer(url: str, answer: type[_Answer]) -> _Answer:
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_TIMEOUT_S) as response:
            return msgspec.json.decode(response.read(), type=answer)
    except urllib.error.HTTPError as error:
        with error:
            raise ConnectionError(f"{url}: HTTP {error.code}") from error
    except msgspec.MsgspecError as error:
        raise msgspec.MsgspecError(f"{url}: {error}") from error


def _config_in(folder: str) -> bytes:
    try:
        return (Path(folder) / "config.json").read_bytes() if folder else b""
    except OSError:
        return b""
