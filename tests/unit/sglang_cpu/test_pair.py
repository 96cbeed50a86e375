"""The flags of the two engines of a pair, and what is refused before one starts."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from forgemq_settings.ports import free_port
from forgemq_sglang_cpu import pair
from forgemq_sglang_cpu.options import EngineOptions, command_line
from forgemq_sglang_cpu.pool import EnginePool
from forgemq_sglang_cpu.server import EngineServer, EngineServerError

ON_CPU = ["--disaggregation-transfer-backend", "mooncake_tcp", "--disable-overlap-schedule"]


def flags(**options: object) -> list[str]:
    command = command_line(EngineOptions(**options), model_path="m", host="h", port=7)  # type: ignore[arg-type]
    return [flag for flag in command if "disaggregation" in flag or "overlap" in flag]


def test_each_role_has_its_own_flags_and_a_unified_engine_none() -> None:
    assert flags() == []
    prefill = pair.arguments("prefill", has_gpu=False, bootstrap_port=9001)
    assert prefill == [
        *("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "9001"),
        *ON_CPU,
    ]
    decode = pair.arguments("decode", has_gpu=True, bootstrap_port=9001)
    assert decode == [
        *("--disaggregation-mode", "decode", "--disaggregation-decode-enable-radix-cache"),
    ]
    assert "--disaggregation-mode" in flags(role="decode")


def test_prefill_has_the_pool_of_a_pair_and_decode_takes_pages_of_its_size() -> None:
    pool = EnginePool(storage="file", folder="/pool", page_tokens=32)
    prefill, decode = (
        command_line(EngineOptions(role=role, pool=pool), model_path="m", host="h", port=7)
        for role in ("prefill", "decode")
    )
    assert "--enable-hierarchical-cache" in prefill
    for command in (prefill, decode):
        assert command[command.index("--page-size") + 1] == "32"
    assert not [flag for flag in decode if "hicache" in flag or "hierarchical" in flag]


def test_an_engine_on_several_gpus_is_told_how_to_spread_its_model() -> None:
    options = EngineOptions(
        has_gpu=True, tensor_parallel=8, expert_parallel=8, attention_data_parallel=4
    )
    command = " ".join(command_line(options, model_path="m", host="h", port=7))
    assert "--tp-size 8 --ep-size 8 --dp-size 4 --enable-dp-attention" in command
    usual = " ".join(command_line(EngineOptions(has_gpu=True), model_path="m", host="h", port=7))
    assert "--ep-size" not in usual
    assert "--enable-dp-attention" not in usual


def started(folder: Path, config: str) -> None:
    (folder / "config.json").write_text(config)
    options = EngineOptions(role="prefill")
    EngineServer(str(folder), folder, port=free_port(), options=options).start()


def test_packages_that_a_cpu_lacks_are_named() -> None:
    libraries = {"libc.so.6": "libc6", "libnone-b.so": "libnone-b1", "libnone-a.so": "libnone-a1"}
    lacks = pair.missing_on_cpu(libraries=libraries)
    assert lacks.startswith("the Debian packages libnone-a1 libnone-b1 (apt-get install)")
    assert "Debian" not in pair.missing_on_cpu(libraries={"libc.so.6": "libc6"})


def test_the_wheel_is_named_with_the_command_of_the_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pair, "find_spec", lambda name: None)
    root = Path(__file__).parents[3]
    lacks = pair.missing_on_cpu(libraries={})
    assert lacks == f"the Python package mooncake ({pair.INSTALL})"
    assert f"\n    {pair.INSTALL}\n" in (root / "docs" / "fleet.md").read_text()
    assert f'pd-cpu = ["{pair.WHEEL}"]' in (root / "pyproject.toml").read_text()


def test_what_moves_keys_between_gpus_is_named_if_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "find_spec", lambda name: None)
    nixl = ("--disaggregation-transfer-backend", "nixl")
    assert pair.missing_on_gpu(nixl).startswith("the Python package nixl (")
    (tmp_path / "config.json").write_text("{}")
    server = EngineServer(
        str(tmp_path),
        tmp_path,
        port=free_port(),
        options=EngineOptions(has_gpu=True, role="decode"),
    )
    install = "uv pip install --no-deps mooncake-transfer-engine-cuda13==0.3.13.post1"
    with pytest.raises(EngineServerError, match=f"^a decode engine on GPUs needs .*{install}"):
        server.start()
    assert install in (Path(__file__).parents[3] / "docs" / "fleet.md").read_text()


def test_a_mixture_of_experts_is_refused_by_each_role(tmp_path: Path) -> None:
    with pytest.raises(EngineServerError, match=r"^a prefill engine cannot serve a mixture"):
        started(tmp_path, '{"num_experts_per_tok": 2}')


@dataclass
class Queue:
    queue: list[str] = field(default_factory=list)


@dataclass
class DecodeScheduler:
    """A request's K/V comes with each look, and its place is there with the look before."""

    disagg_decode_prealloc_queue: Queue | None
    disagg_decode_transfer_queue: Queue
    waiting_queue: list[str] = field(default_factory=list)
    _engine_paused: bool = False
    looks: int = 0

    def process_decode_queue(self) -> None:
        assert self.disagg_decode_prealloc_queue is not None
        self.looks += 1
        self.waiting_queue += self.disagg_decode_transfer_queue.queue[:1]
        del self.disagg_decode_transfer_queue.queue[:1]
        self.disagg_decode_transfer_queue.queue += self.disagg_decode_prealloc_queue.queue[:1]
        del self.disagg_decode_prealloc_queue.queue[:1]


def test_a_decode_engine_takes_what_has_come_before_it_pauses() -> None:
    scheduler = DecodeScheduler(Queue(["c"]), Queue(["a", "b"]))
    pair.take_what_has_come(scheduler, "the request to pause")
    assert (scheduler.waiting_queue, scheduler.looks) == (["a", "b", "c"], 3)


def test_an_engine_that_is_paused_or_no_decode_engine_looks_for_nothing() -> None:
    paused = DecodeScheduler(Queue(), Queue(["a"]), _engine_paused=True)
    other = DecodeScheduler(None, Queue(["a"]))
    for scheduler in (paused, other):
        pair.take_what_has_come(scheduler)
        assert (scheduler.waiting_queue, scheduler.looks) == ([], 0)


@pytest.mark.slow
def test_what_does_not_come_holds_a_pause_up_for_a_bounded_time() -> None:
    class Stuck(DecodeScheduler):
        def process_decode_queue(self) -> None:
            self.looks += 1

    scheduler = Stuck(Queue(["a"]), Queue())
    pair.take_what_has_come(scheduler)
    assert scheduler.looks == pair._TAKE_ROUNDS_MAX
