"""A gateway with a certificate: agents, the launcher and other gateways, over real handshakes."""

import asyncio
import logging
import os
import ssl
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import pytest

from forgemq_agents.errors import GatewayError
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.requests import JsonRequests, Retry
from forgemq_gateway import http_server
from forgemq_gateway.links import LinkLostError, Links, request_head
from forgemq_gateway.settings import GatewaySettings
from tests.certificates import authority
from tests.unit.gateway.test_chat import HELLO, log_store, say
from tests.unit.gateway.world import (
    ADMIN_KEY,
    SETTINGS,
    World,
    configuration_of,
    plain_http,
    running,
)

# What the run's own clients do, in a process that trusts what its environment names.
CLIENTS = """
import asyncio, sys
import aiohttp, openai
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.requests import JsonRequests, Retry
from forgemq_launcher.commands.lane_changes import list_lanes
from forgemq_launcher.commands.own_gateway import RunGateway
from rich.console import Console

async def main(url, admin_key, base_url, key):
    async with aiohttp.ClientSession() as http:
        requests = JsonRequests(http, retry=Retry(deadline_s=0.1))
        run = await GatewayClient(requests, url=url, admin_key=admin_key).read_run()
        print("agents", run.domains[0])
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        messages = [{"role": "user", "content": "hello"}]
        said = await client.chat.completions.create(model="m", messages=messages)
        print("openai", said.choices[0].message.content)

asyncio.run(main(*sys.argv[1:]))
print("launcher", list_lanes(RunGateway(*sys.argv[1:3], is_here=False), Console(quiet=True)))
"""


@dataclass(frozen=True)
class Secure:
    """Settings of a gateway with a certificate, and the file by which a client trusts it."""

    settings: GatewaySettings
    trusted: Path


@pytest.fixture
def secure(tmp_path: Path) -> Secure:
    ca = authority()
    certificate, key = ca.write_server(tmp_path)
    settings = msgspec.structs.replace(
        SETTINGS, tls_certificate_file=str(certificate), tls_key_file=str(key)
    )
    return Secure(settings, ca.write(tmp_path / "ca.pem"))


async def clients(world: World, *, trusted: Path) -> list[str]:
    """What the clients of a run say."""
    claim = await world.episode()
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", CLIENTS, world.base_url, ADMIN_KEY, claim["base_url"], claim["key"]],
        env={**os.environ, "SSL_CERT_FILE": str(trusted)},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.slow  # Starts a process that loads clients of others.
async def test_agents_an_unmodified_client_and_the_launcher_reach_a_gateway_that_they_trust(
    model: Path, secure: Secure
) -> None:
    settings = secure.settings
    async with running(log_store(), configuration_of(model), say("yes"), settings=settings) as (
        world,
        _,
    ):
        assert world.base_url.startswith("https://")
        said = await clients(world, trusted=secure.trusted)
        assert said == ["agents shop", "openai yes", "launcher 0"]


async def test_a_claim_names_the_https_address(model: Path, secure: Secure) -> None:
    settings = secure.settings
    async with running(log_store(), configuration_of(model), say("yes"), settings=settings) as (
        world,
        _,
    ):
        claim = await world.episode()
        assert claim["base_url"] == f"{world.base_url}/v1"
        assert claim["session_url"].startswith(f"{world.base_url}/s/")


@pytest.mark.slow
async def test_gateways_send_requests_on_to_each_other_over_tls(
    model: Path, secure: Secure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(secure.trusted))
    settings = secure.settings
    async with running(log_store(), configuration_of(model), say("yes"), settings=settings) as (
        world,
        _,
    ):
        await world.start_another()
        urls = [gateway.url for gateway in world.gateways]
        assert len(set(urls)) == 2
        for number in range(4):
            claim = await world.claim(await world.open_group(f"k{number}"))
            async with plain_http(timeout_s=20) as http:
                for url in urls:  # One of them does not own the group.
                    said = await http.post(
                        f"{url}/v1/chat/completions",
                        json={"model": "m", "messages": [*HELLO, *HELLO[:1]]},
                        headers={"x-api-key": claim["key"]},
                    )
                    assert (said.status_code, said.json()["choices"][0]["message"]["content"]) == (
                        200,
                        "yes",
                    )


async def test_nobody_speaks_to_a_gateway_that_he_does_not_trust(
    model: Path, secure: Secure
) -> None:
    settings = secure.settings
    async with running(log_store(), configuration_of(model), say("yes"), settings=settings) as (
        world,
        _,
    ):
        links = Links(connect_s=5.0)
        with pytest.raises(LinkLostError, match="CERTIFICATE_VERIFY_FAILED"):
            async with links.to(world.base_url) as link:
                link.begin(request_head("GET", world.base_url, target=b"/live", headers=()))
        links.close()
        retry = Retry(deadline_s=0.1, first_wait_s=0.2)
        async with aiohttp.ClientSession() as http:
            agents = GatewayClient(
                JsonRequests(http, retry=retry), url=world.base_url, admin_key=ADMIN_KEY
            )
            with pytest.raises(GatewayError, match="CERTIFICATE_VERIFY_FAILED"):
                await agents.read_run()


async def test_what_does_no_handshake_is_closed_in_time_and_harms_nobody(
    model: Path,
    secure: Secure,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(http_server, "HEADERS_S", 0.3)
    settings = secure.settings
    async with running(log_store(), configuration_of(model), say("yes"), settings=settings) as (
        world,
        _,
    ):
        port = int(world.base_url.rpartition(":")[2])
        for sent in (b"", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01\x00"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            async with asyncio.timeout(5):
                answer = await reader.read()
            assert b"HTTP" not in answer
            writer.close()
            await writer.wait_closed()
        async with plain_http() as http:
            assert (await http.get(f"{world.base_url}/health")).status_code == 200
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


async def test_a_new_certificate_is_shown_without_a_restart(
    model: Path, secure: Secure, tmp_path: Path
) -> None:
    settings = secure.settings
    async with running(log_store(), configuration_of(model), say("yes"), settings=settings) as (
        world,
        _,
    ):
        port = int(world.base_url.rpartition(":")[2])
        first = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
        new = authority("the next authority")
        new.write_server(tmp_path)
        async with asyncio.timeout(20):
            while True:
                shown = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
                if shown != first:
                    break
                await asyncio.sleep(0.1)
        assert shown == (tmp_path / "server.pem").read_text()
