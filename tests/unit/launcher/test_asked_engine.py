"""Which servers `forgemq add-lane --engine` refuses, before the run has another lane."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from forgemq_contracts.run import Model
from forgemq_launcher.commands.asked_engine import engine_refusal
from forgemq_launcher.commands.lane_changes import LaneRefusedError, add_lane
from forgemq_launcher.commands.own_gateway import RunGateway
from forgemq_settings.ports import free_port

LIMITS = {"max_total_num_tokens": 40000, "max_req_input_len": 1018}
WEIGHTS = {"weight_version": "0.0", "model_path": "/elsewhere/model"}
ENGINE: dict[str, object] = {"/health": {}, "/server_info": LIMITS, "/model_info": WEIGHTS}


@contextmanager
def answering(answers: dict[str, object]) -> Iterator[str]:
    """Address of a server that answers these paths; 404 to others, the status to a number."""

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path, 404)
            body = b"" if isinstance(answer, int) else json.dumps(answer).encode()
            self.send_response(answer if isinstance(answer, int) else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def model_in(folder: Path, **sizes: int) -> Model:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(sizes))
    return Model(path=str(folder))


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({}, "does not answer a health check: HTTP 404"),
        ({"/health": {}}, "must be an SGLang engine, and does not answer as one: "),
        ({**ENGINE, "/server_info": 500}, "/server_info: HTTP 500"),
        ({**ENGINE, "/server_info": {"name": "a web server"}}, "`max_total_num_tokens`"),
        ({**ENGINE, "/model_info": []}, "/model_info: Expected `object`, got `array`"),
        (
            {**ENGINE, "/server_info": {**LIMITS, "quantization": "awq"}},
            "model.engine_quantization",
        ),
        (
            {**ENGINE, "/server_info": {**LIMITS, "dp_size": 2}},
            "--dp-size 2 and not --enable-dp-attention, so it is 2 engines behind one address",
        ),
        (
            {**ENGINE, "/server_info": {**LIMITS, "disaggregation_mode": "prefill"}},
            "is a prefill engine: the lane needs FORGEMQ_INFERENCE_PREFILL_URL",
        ),
    ],
)
def test_a_server_that_cannot_serve_the_run_is_refused_by_the_rule(
    answers: dict[str, object], words: str, tmp_path: Path
) -> None:
    with answering(answers) as url:
        refusal = engine_refusal(url, model_in(tmp_path / "model"))
    assert (url in refusal, words in refusal) == (True, True), refusal


def test_an_engine_of_another_model_is_refused_by_the_field(tmp_path: Path) -> None:
    wanted = model_in(tmp_path / "wanted", hidden_size=128, vocab_size=704)
    model_in(tmp_path / "other", hidden_size=64, vocab_size=704)
    engine = {**ENGINE, "/model_info": {**WEIGHTS, "model_path": str(tmp_path / "other")}}
    with answering(engine) as url:
        refusal = engine_refusal(url, wanted)
    assert refusal.startswith("model.path: its config.json has hidden_size 128, and that of the ")


def test_an_engine_is_taken_also_if_its_folder_is_on_another_machine(tmp_path: Path) -> None:
    with answering(ENGINE) as url:
        assert engine_refusal(url, model_in(tmp_path / "model", vocab_size=704)) == ""


def test_the_gateway_is_not_asked_for_a_lane_of_a_server_that_is_no_engine(tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    gateway = RunGateway(nobody, "key", is_here=True, model=model_in(tmp_path / "model"))
    with (
        answering({"/health": {}}) as url,
        pytest.raises(LaneRefusedError, match=r"^--engine: .* must be an SGLang engine"),
    ):
        add_lane(gateway, Console(quiet=True), lane=None, engine_url=url)
