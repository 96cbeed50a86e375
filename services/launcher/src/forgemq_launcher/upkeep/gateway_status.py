"""What the run's gateway tells agents that are not started with the run."""

import http.client
import urllib.request

import msgspec

from forgemq_contracts.admin import RunStatus
from forgemq_contracts.admin_routes import READ_RUN

ANSWER_TIMEOUT_S = 10.0
"""A gateway that starts holds its first requests until it has read its topics, seconds."""


def says_training_ended(gateway_url: str, *, admin_key: str) -> bool:
    """Whether the gateway answers, and its answer says that training has ended."""
    headers = {"Authorization": f"Bearer {admin_key}"}
    request = urllib.request.Request(gateway_url + READ_RUN.path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            return msgspec.json.decode(answer.read(), type=RunStatus).training_ended
    except (OSError, http.client.HTTPException, msgspec.MsgspecError):
        return False
