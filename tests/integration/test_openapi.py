"""What the admin API answers is what its document says, for any request made of the document."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import (
    ignored_auth,
    negative_data_rejection,
    positive_data_acceptance,
)

from forgemq_bus.kafka import KafkaConnection, KafkaLog
from tests.unit.gateway.served import Served, serving
from tests.unit.gateway.world import ADMIN_KEY, configuration_of
from tests.unit.rendering.folders import write_model_folder

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    # Hypothesis sees that the gateway's thread draws random numbers, and takes it for a strategy.
    pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies"),
]

DOCUMENT = Path(__file__).parents[2] / "contracts" / "openapi.json"
API = schemathesis.openapi.from_dict(json.loads(DOCUMENT.read_text()))
WAIT_S_MAX = 0.05
ENDS_EPISODE = ("/finish", "/abort")


@pytest.fixture(scope="module")
def served(
    kafka_bootstrap: str, new_run_id: Callable[[], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """One gateway on the broker, with an open episode."""
    run, model = new_run_id(), write_model_folder(tmp_path_factory.mktemp("openapi") / "model")

    def open_log() -> KafkaLog:
        return KafkaLog(KafkaConnection(bootstrap=kafka_bootstrap), run=run)

    with serving(open_log, configuration_of(model, run=run)) as gateway:
        yield gateway


def known(served: Served, path: str) -> dict[str, str]:
    """Ids of what is there, by parameter; an episode only for routes that do not end it."""
    ids = {"group_id": served.group_id}
    return ids if path.endswith(ENDS_EPISODE) else ids | {"episode_id": served.episode_id}


@API.parametrize()
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_an_answer_has_a_status_headers_and_a_body_that_the_document_names(
    case: schemathesis.Case, served: Served
) -> None:
    ids = known(served, case.operation.path)
    # A schema does not know the run: a domain that it allows may be none of the run's.
    # A key that was drawn is replaced below, and the check would take ours for the drawn one; who
    # has no key is refused in tests/unit/gateway.
    excluded = [positive_data_acceptance, ignored_auth]
    # Made-up ids are unknown: every second request is about what is there.
    if len(str(case.path_parameters)) % 2:
        case.path_parameters.update({k: v for k, v in ids.items() if k in case.path_parameters})
        # What is there may be waited for.
        for given in (case.query, case.body):
            if isinstance(given, dict) and isinstance(given.get("wait_s"), int | float):
                given["wait_s"] = min(given["wait_s"], WAIT_S_MAX)
        # The id may have been what was wrong. A query or field that nobody knows is never refused.
        excluded.append(negative_data_rejection)
    case.headers["Authorization"] = f"Bearer {ADMIN_KEY}"
    case.call_and_validate(base_url=served.url, excluded_checks=excluded)
    assert served.group()["state"] == "admitted"
