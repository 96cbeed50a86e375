"""What an error in the renewal of a lease does to the process."""

import asyncio
import os
import socket

import aiohttp
import msgspec
import pytest

from forgemq_agents.episode_player import EpisodePlayer
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.lease_thread import LeaseThread
from forgemq_agents.requests import JsonRequests, Retry
from tests.unit.agents.test_black_box import CLAIM, SILENT

pytestmark = pytest.mark.wall_clock  # The heartbeats are on the clock of a thread.


async def test_a_heartbeat_that_cannot_be_sent_at_all_ends_the_process_with_its_error():
    """A key with a line break is no header: the request fails before the gateway is asked."""
    claim = msgspec.structs.replace(CLAIM, lease_s=0.03)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    leases = LeaseThread(url=url, admin_key="two\nlines", retry=Retry())

    async def agent(episode) -> None:
        await asyncio.sleep(20)

    async with aiohttp.ClientSession() as http, leases:
        requests = JsonRequests(http, retry=Retry())
        player = EpisodePlayer(
            gateway=GatewayClient(requests, url=url, admin_key="key"),
            requests=requests,
            leases=leases,
            environ=dict(os.environ),
            telemetry=SILENT,
        )
        async with asyncio.timeout(5):
            with pytest.raises(ExceptionGroup) as caught:
                await player.play(claim, agent)
    listener.close()
    assert caught.group_contains(ValueError, match="detected in headers")
