"""A run without agents of its own ends after its gateway has said that training has ended."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import msgspec

from forgemq_contracts.admin import RunStatus
from forgemq_contracts.admin_routes import READ_RUN
from forgemq_launcher.outcome import tell_agents
from forgemq_launcher.upkeep.gateway_status import says_training_ended
from forgemq_launcher.upkeep.stop_signal import StopSignal

KEY = "admin"
TRAINING = RunStatus(
    run="r",
    steps=4,
    steps_trained=3,
    training_ended=False,
    domains=("add",),
    first_tasks={"add": 9},
)
ENDED = msgspec.structs.replace(TRAINING, steps_trained=4, training_ended=True)


@contextmanager
def gateway(answers: list[RunStatus | None]) -> Iterator[str]:
    """An HTTP server that gives these answers, one a request; None is a 503."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == READ_RUN.path
            assert self.headers["Authorization"] == f"Bearer {KEY}"
            answer = answers.pop(0)
            self.send_response(503 if answer is None else 200)
            self.end_headers()
            self.wfile.write(b"" if answer is None else msgspec.json.encode(answer))

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    serving = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def test_only_an_answer_that_says_so_means_that_training_has_ended() -> None:
    with gateway([None, TRAINING, ENDED]) as url:
        said = [says_training_ended(url, admin_key=KEY) for _ in range(3)]
    assert said == [False, False, True]
    assert not says_training_ended(url, admin_key=KEY), "nothing listens there any more"


async def test_agents_are_told_once_the_gateway_says_that_training_has_ended() -> None:
    stop = StopSignal(kill=lambda: None, note=lambda _: None)
    answers: list[RunStatus | None] = [TRAINING, ENDED]
    with gateway(answers) as url:
        await tell_agents(lambda: says_training_ended(url, admin_key=KEY), stop=stop, told_s=0)
    assert answers == []


async def test_a_signal_ends_the_wait_for_agents_that_are_told() -> None:
    stop = StopSignal(kill=lambda: None, note=lambda _: None)
    waiting = asyncio.create_task(tell_agents(lambda: True, stop=stop, told_s=3600))
    await asyncio.sleep(0.01)
    stop.event.set()
    await asyncio.wait_for(waiting, 5)
