"""Which groups may train in a domain: imports where it is supervised, sampled ones elsewhere."""

from forgemq_contracts.admin import GroupRequest
from forgemq_contracts.run import Queue
from forgemq_gateway.core.errors import invalid


def check_trains(request: GroupRequest, queue: Queue) -> None:
    """Return if groups of this source may train in this domain.

    Raises:
        RefusedError: 400, naming the field and the rule.
    """
    if request.purpose != "train" or (request.source == "import") == (queue.supervised is not None):
        return
    if request.source == "import":
        raise invalid(
            f"purpose must be eval: imports of {queue.domain} never train, as queues."
            f"{queue.domain}.supervised is not given",
            param="purpose",
        )
    raise invalid(
        f"source must be import: {queue.domain} is supervised, and trains finished conversations",
        param="source",
    )
