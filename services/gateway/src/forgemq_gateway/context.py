"""What all parts of one gateway process share."""

import asyncio
from dataclasses import dataclass

from forgemq_contracts.run import RunConfiguration
from forgemq_gateway.change_signal import ChangeSignal
from forgemq_gateway.clock import Clock
from forgemq_gateway.core.gateways import Gateways
from forgemq_gateway.core.registry import Registry
from forgemq_gateway.fenced_writer import FencedWriter
from forgemq_gateway.lane_changes import LaneChanges
from forgemq_gateway.outbox import Outbox
from forgemq_gateway.ownership import ReadBack
from forgemq_gateway.settings import GatewaySettings
from forgemq_gateway.standstill import Standstill
from forgemq_telemetry.telemetry import Telemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayContext:
    """One of each per process.

    Attributes:
        registry: Groups and episodes as the log has them.
        gateways: Which gateway owns which groups.
        read_back: How far the log is applied here.
        standstill: Whether this process may have missed a change of owners.
        fenced: Writes what the outbox promises, and fences the writers of earlier owners.
        lane_changes: Which lanes the run is to have.
        changed: Notified with the id of a group that may have changed, or an episode of it.
        tasks: Owns everything that runs beside a request; an error in it ends the gateway.
    """

    configuration: RunConfiguration
    settings: GatewaySettings
    registry: Registry
    gateways: Gateways
    read_back: ReadBack
    standstill: Standstill
    outbox: Outbox
    fenced: FencedWriter
    clock: Clock
    lane_changes: LaneChanges
    changed: ChangeSignal
    tasks: asyncio.TaskGroup
    telemetry: Telemetry
