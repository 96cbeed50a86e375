"""Agents that are not started with a run: what a person types, and when they know of the end."""

from forgemq_contracts.queues import supplied_queues
from forgemq_contracts.run import RunConfiguration

TOLD_S = 5.0
"""Agents outside that try a gateway again do so after at most this, as the agents of a run do."""

ASKED = """\
curl -sS $GATEWAY/v1/groups -H "Authorization: Bearer $ADMIN_KEY" \
-d '{"domain": "DOMAIN", "idempotency_key": "task/0", "task": {"n": 0}}'
curl -sS "$GATEWAY/v1/groups/GROUP?wait_s=20&state=requested" -H "Authorization: Bearer $ADMIN_KEY"
curl -sS $GATEWAY/v1/groups/GROUP/claim -H "Authorization: Bearer $ADMIN_KEY" -d '{"wait_s": 5}'
curl -sS $GATEWAY/v1/episodes/EPISODE/finish -H "Authorization: Bearer $ADMIN_KEY" -d '{}'"""
"""One episode: GROUP is in the first answer; EPISODE, its key and its base_url are in the third."""


def outside_agents(configuration: RunConfiguration, *, gateway_url: str, admin_key: str) -> str:
    """The commands for groups that no process of the run asks for; '' if there are no such.

    Args:
        configuration: Says which queues have no agent.
        gateway_url: Base address of the gateway.
        admin_key: How a shell gets at the key: `$(head -n1 FILE)` or `$VARIABLE`.
    """
    supplied = supplied_queues(configuration)
    others = [queue for queue in configuration.queues if queue not in supplied]
    lines = [
        f"conversations of {queue.domain} are waited for: "
        f"forgemq import {configuration.run} FILE --domain {queue.domain}"
        for queue in others
        if queue.supervised is not None
    ]
    domains = [queue.domain for queue in others if queue.supervised is None]
    if domains:
        lines += [
            f"groups of {', '.join(domains)} are asked for over HTTP (docs/your_agent.md):",
            f"export GATEWAY={gateway_url} ADMIN_KEY={admin_key}",
            *ASKED.replace("DOMAIN", domains[0]).splitlines(),
        ]
    return "\n  ".join(lines)
