"""Whether the histories that a run can have open fit into the gateway's memory limit."""

from forgemq_contracts.run import RunConfiguration
from forgemq_gateway.context import GatewayContext

TOKEN_BYTES = 16
"""What a token of a history takes: 4 for its id; 4 more for its log-probability and about 4 of text
if it was sampled, as a good part of an agent's history is; and about 4 of JSON and 4 of text in the
newest body, which the next one repeats."""


def memory_shortage(configuration: RunConfiguration, *, memory_bytes_max: int) -> str:
    """The warning about too little memory; "" if N x G histories of full length fit."""
    admitted = sum(queue.slots * queue.group_size for queue in configuration.queues)
    context = configuration.model.context_tokens_max
    needed = admitted * context * TOKEN_BYTES
    if needed <= memory_bytes_max:
        return ""
    parts = ", ".join(f"{q.domain}: {q.slots} x {q.group_size}" for q in configuration.queues)
    return (
        f"the queues admit N x G = {admitted} episodes ({parts}), which take {needed / 1e9:.1f} GB "
        f"at model.context_tokens_max = {context} tokens of {TOKEN_BYTES} bytes, and "
        f"FORGEMQ_GATEWAY_MEMORY_BYTES_MAX is {memory_bytes_max / 1e9:.1f} GB: if episodes are "
        "long, groups get 429 and chat 503; raise it, or lower slots (N)"
    )


def report_memory_shortage(context: GatewayContext) -> None:
    """Write the warning as an event, if there is one; the gateway serves all the same."""
    limit = context.settings.memory_bytes_max
    if short := memory_shortage(context.configuration, memory_bytes_max=limit):
        context.telemetry.event("small_memory", detail=short)
