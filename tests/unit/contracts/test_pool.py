"""Which pools a run's file may ask for."""

import msgspec
import pytest

from forgemq_contracts.pool import Pool
from forgemq_contracts.run_rules import check
from tests.unit.contracts.test_run import SOUND

SERVERS = '{"master_server_address": "store:50051"}'


@pytest.mark.parametrize(
    "pool",
    [
        Pool(storage="file"),
        Pool(storage="file", folder="/shared", folder_gb_max=20.0),
        Pool(storage="mooncake", extra_config=SERVERS, page_tokens=64),
        Pool(storage="hf3fs", extra_config="@/etc/hf3fs.json"),
    ],
)
def test_a_pool_with_what_its_storage_needs_is_taken(pool: Pool) -> None:
    check(msgspec.structs.replace(SOUND, pool=pool))


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (Pool(storage="file", extra_config=SERVERS), r"^pool\.extra_config must be left out"),
        (
            Pool(storage="hf3fs", extra_config=SERVERS, folder="/x"),
            r"^pool\.folder must be left out",
        ),
        (
            Pool(storage="mooncake", extra_config=SERVERS, folder_gb_max=1.0),
            r"^pool\.folder_gb_max must be left out .* got 1\.0",
        ),
        (Pool(storage="mooncake"), r"^pool\.extra_config must be a JSON object.*got ''"),
        (Pool(storage="mooncake", extra_config="@"), r"^pool\.extra_config must be"),
        (Pool(storage="hf3fs", extra_config="[1]"), r"^pool\.extra_config must be"),
    ],
)
def test_a_pool_that_cannot_work_is_refused_by_field(pool: Pool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(msgspec.structs.replace(SOUND, pool=pool))
