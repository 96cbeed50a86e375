"""Brings conversations of a file into the training of a supervised domain."""

from typing import Literal, TypeAlias

from forgemq_agents import supervised
from forgemq_agents.core.conversations import FinishedConversation
from forgemq_agents.episode_player import EpisodePlayer
from forgemq_agents.errors import EpisodeOverError, GatewayError, TrainingEndedError
from forgemq_agents.gateway_client import GatewayClient
from forgemq_contracts.admin import GroupStatus

STATE_WAIT_S = 5.0
"""Length of one long poll for a slot, hence how late the end of training is seen."""

NO_ROOM = 429
"""The gateway has as many groups of the domain waiting as it takes."""

LOST: tuple[str, ...] = ("failed", "expired")
"""Ends of a group that say that its conversation trains nothing, though training went on."""

End: TypeAlias = Literal["added", "known", "unused"]
"""added: its replies are read. known: the run has it already. unused: training ended before."""


class ConversationLostError(Exception):
    """A conversation is in the run and will not train; the text names its group and the reason."""


class TrainedConversations:
    """Asks for a group for each conversation and plays it once it has a slot.

    A group is left when its replies are read: it then waits for its step like every other one.
    """

    def __init__(self, gateway: GatewayClient, *, player: EpisodePlayer) -> None:
        self._gateway = gateway
        self._player = player

    async def add(self, conversation: FinishedConversation, *, domain: str) -> End:
        """Bring one conversation to where its replies are read.

        Raises:
            ConversationLostError: a reply was refused, or the group has failed.
            GatewayError: the gateway refuses, or was away for too long.
        """
        try:
            status = await self._request(conversation, domain=domain)
            return await self._follow(status)
        except TrainingEndedError:
            return "unused"
        except EpisodeOverError:  # It retired so long ago that its status is forgotten.
            return "known"

    async def _request(self, conversation: FinishedConversation, *, domain: str) -> GroupStatus:
        while True:
            try:
                return await self._gateway.request_group(conversation.group(domain, trains=True))
            except GatewayError as error:
                if error.status != NO_ROOM:
                    raise

    async def _follow(self, status: GroupStatus) -> End:
        end: End = "known"
        while status.state != "retired" and not status.finished:
            claim = await self._gateway.claim(status.group_id) if _is_free(status) else None
            if claim is not None:
                aborted = await self._player.play(claim, supervised.play)
                if aborted:
                    raise ConversationLostError(f"{status.group_id} was aborted: {aborted}")
                end = "added"
            elif status.state == "requested" and (await self._gateway.read_run()).training_ended:
                return "unused"
            wait_s = 0.0 if claim is not None else STATE_WAIT_S
            status = await self._gateway.read_group(status, wait_s=wait_s)
        if status.retire_reason in LOST:
            raise ConversationLostError(f"{status.group_id} retired as {status.retire_reason}")
        return end


def _is_free(status: GroupStatus) -> bool:
    return status.state == "admitted" and not status.open
