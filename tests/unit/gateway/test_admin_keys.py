"""Admin keys: from a setting or a file, kept as hashes, changed without a restart."""

import asyncio
import gc
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from forgemq_contracts import topics
from forgemq_gateway.admin_keys import FollowedKeys
from forgemq_gateway.app import serve
from forgemq_gateway.core.keys import AdminKeys, KeyMint
from forgemq_gateway.settings import GatewaySettings
from forgemq_settings.environment import SettingsError
from forgemq_settings.key_file import KEYS_MAX, PUBLISHED_KEYS
from forgemq_telemetry.telemetry import Telemetry
from tests.unit.gateway.test_chat import HELLO, log_store, say
from tests.unit.gateway.world import ADMIN_KEY, SETTINGS, configuration_of, running

OLD, NEW = "the-old-admin-key-0", "the-new-admin-key-1"
ROOT = Path(__file__).parents[3]


class KeyScene:
    """A file of keys and what is read of it."""

    def __init__(self, path: Path, *, host: str = "127.0.0.1", admin_key: str = "") -> None:
        self.path = path
        self.keys = AdminKeys((admin_key,) if admin_key else (), run="r")
        settings = GatewaySettings(admin_key=admin_key, admin_key_file=str(path))
        self.file = FollowedKeys(
            settings, keys=self.keys, hosts=(host,), telemetry=Telemetry(service="gateway")
        )

    def write(self, *lines: str) -> None:
        before = self.path.stat().st_mtime_ns if self.path.exists() else 0
        self.path.write_text("\n".join(lines))
        os.utime(self.path, ns=(before + 1_000_000, before + 1_000_000))

    def valid(self) -> list[str]:
        return [key for key in (OLD, NEW) if self.keys.is_valid(key)]


@pytest.fixture
def scene(tmp_path: Path) -> KeyScene:
    return KeyScene(tmp_path / "keys")


def test_during_an_overlap_both_keys_are_valid_and_new_episodes_get_keys_of_the_first(
    scene: KeyScene,
) -> None:
    scene.write(OLD)
    scene.file.start()
    key_of_old = scene.keys.key_of("g-1.0.0")
    scene.write("# the newest first", NEW, "", OLD)
    scene.file.look()
    assert scene.valid() == [OLD, NEW]
    assert scene.keys.episode_of(key_of_old) == "g-1.0.0"
    assert scene.keys.key_of("g-1.0.0") == KeyMint(NEW, run="r").key_of("g-1.0.0")
    scene.write(NEW)
    scene.file.look()
    assert scene.valid() == [NEW]
    assert scene.keys.episode_of(key_of_old) is None


@pytest.mark.parametrize("lines", [(), ("short",), tuple(f"{NEW}{n}" for n in range(KEYS_MAX + 1))])
def test_a_file_that_breaks_a_rule_leaves_the_keys_of_before(
    scene: KeyScene, lines: tuple[str, ...]
) -> None:
    scene.write(OLD)
    scene.file.start()
    scene.write(*lines)
    scene.file.look()
    assert scene.valid() == [OLD]
    scene.path.unlink()
    scene.file.look()
    assert scene.valid() == [OLD]
    scene.write(NEW)
    scene.file.look()
    assert scene.valid() == [NEW]


def test_the_settings_key_stays_valid_beside_a_file(tmp_path: Path) -> None:
    scene = KeyScene(tmp_path / "keys", admin_key=OLD)
    scene.write(NEW)
    scene.file.start()
    assert scene.valid() == [OLD, NEW]


@pytest.mark.parametrize("content", [b"", b"short\n", b"\xff\xfe-not-text-\xff-at-all-\n", None])
def test_a_start_without_a_good_file_ends_with_an_error_that_repeats_no_key(
    scene: KeyScene, content: bytes | None
) -> None:
    if content is not None:
        scene.path.write_bytes(content)
    with pytest.raises(SettingsError, match="FORGEMQ_GATEWAY_ADMIN_KEY_FILE: ") as refused:
        scene.file.start()
    assert "short" not in str(refused.value).replace("too short", "")
    assert refused.value.__cause__ is None or isinstance(refused.value.__cause__, OSError)


def test_a_start_without_any_key_says_which_setting_is_missing() -> None:
    file = FollowedKeys(
        GatewaySettings(),
        keys=AdminKeys((), run="r"),
        hosts=("127.0.0.1",),
        telemetry=Telemetry(service="gateway"),
    )
    with pytest.raises(SettingsError, match="FORGEMQ_GATEWAY_ADMIN_KEY: must be set"):
        file.start()


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::"])
@pytest.mark.parametrize("key", sorted(PUBLISHED_KEYS))
def test_a_published_key_is_refused_off_loopback(tmp_path: Path, host: str, key: str) -> None:
    by_setting = KeyScene(tmp_path / "a", host=host, admin_key=key)
    by_file = KeyScene(tmp_path / "b", host=host)
    for scene, line in ((by_setting, NEW), (by_file, key)):
        scene.write(line)
        with pytest.raises(SettingsError, match="the documents show") as refused:
            scene.file.start()
        assert key not in str(refused.value)


async def test_a_published_key_is_refused_if_only_the_port_for_gateways_is_off_loopback(
    model: Path,
) -> None:
    """A supervisor hands over a socket on loopback, and the peers' port is at the host."""
    settings = GatewaySettings(admin_key="0123456789abcdef", host="0.0.0.0", peer_port=0)
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        with pytest.raises(SettingsError, match=r"0\.0\.0\.0 is no loopback address"):
            await serve(
                configuration=configuration_of(model),
                settings=settings,
                log=log_store()(),
                telemetry=Telemetry(service="gateway"),
                stop=asyncio.Event(),
                listener=listener,
            )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1"])
def test_a_published_key_may_be_used_on_loopback(tmp_path: Path, host: str) -> None:
    scene = KeyScene(tmp_path / "keys", host=host)
    scene.write(*sorted(PUBLISHED_KEYS))
    scene.file.start()
    assert all(scene.keys.is_valid(key) for key in PUBLISHED_KEYS)


def shown_keys() -> Iterator[str]:
    for folder in ("docs", "deploy", "services"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".md", ".yaml", ".toml"}:
                yield from re.findall(
                    r"(?:ADMIN_KEY|admin-key)=([\w-]{16,})", path.read_text(encoding="utf-8")
                )


def test_every_key_that_the_documents_show_counts_as_published() -> None:
    assert set(shown_keys()) <= PUBLISHED_KEYS
    assert "0123456789abcdef" in set(shown_keys())


async def test_an_open_episode_outlives_the_admin_key_that_it_was_claimed_under(
    model: Path, tmp_path: Path
) -> None:
    """Its record has the hash of its key; the key of the setting stays for the admin's work."""
    file = tmp_path / "keys"
    file.write_text(OLD)
    settings = msgspec.structs.replace(SETTINGS, admin_key_file=str(file))
    async with running(log_store(), configuration_of(model), say("hello"), settings=settings) as (
        world,
        _,
    ):
        claim = await world.episode()
        file.write_text(f"{NEW}, which is longer\n")
        async with asyncio.timeout(30):
            while (await world.admin("GET", "/v1/run", key=OLD)).status_code == 200:  # noqa: ASYNC110 - the file is polled
                await asyncio.sleep(0.2)
        answer = await world.client(claim).chat.completions.create(model="any", messages=HELLO)
    assert KeyMint(OLD, run="r").episode_of(claim["key"]) == claim["episode_id"]
    assert answer.choices[0].message.content == "hello"


@pytest.mark.slow
async def test_no_key_is_in_a_record_an_event_or_a_setting_that_is_kept(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running(log_store(), configuration_of(model), say("hello")) as (world, _):
        claim = await world.episode()
        client = world.client(claim)
        await client.chat.completions.create(model="any", messages=HELLO)
        wrong = await world.admin("GET", f"/s/{claim['key']}x/v1/models", key=ADMIN_KEY + "x")
        await world.admin("POST", f"/v1/episodes/{claim['episode_id']}/finish", {})
        gc.collect()  # What other tests left in cycles.
        kept = [each for each in gc.get_objects() if type(each) is GatewaySettings]
        written = [str(record) for topic in topics.OF_RUN for record in await world.records(topic)]
    said = "".join(capfd.readouterr()) + wrong.text + "".join(written)
    assert wrong.status_code == 401
    assert ADMIN_KEY not in said
    assert claim["key"] not in said
    assert [each.admin_key for each in kept if each is not world.settings] == [""] * (len(kept) - 1)
