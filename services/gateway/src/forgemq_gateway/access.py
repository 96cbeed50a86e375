"""Checks keys: the admin key opens the admin API, an episode key opens its episode."""

import hmac
import re
from collections.abc import Iterable, Mapping

from forgemq_contracts.live_key import LiveKey
from forgemq_contracts.partitions import group_of_episode
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.errors import (
    MovedError,
    RefusedError,
    conflict,
    gone,
    invalid,
    unauthorized,
    unknown,
)
from forgemq_gateway.core.gateways import Gateways
from forgemq_gateway.core.keys import AdminKeys, key_sha256
from forgemq_gateway.core.live import SESSION_HEADER, LiveCaller, LiveKeys
from forgemq_gateway.core.registry import Registry
from forgemq_gateway.wire import Scope, headers_of
from forgemq_settings.key_file import KEYS_MAX

_EPISODE_ID = re.compile(r"[a-z0-9-]{1,64}\.[0-9]{1,9}\.[0-9]{1,9}")
# As many as an admin key file may have, and one of the settings.
_SEALS_MAX = KEYS_MAX + 1

# Clients of OpenAI, Anthropic and Azure send keys in these. One may send several, of which one is
# for a proxy, or of another provider.
_KEY_HEADERS = ("authorization", "x-api-key", "api-key")


class Access:
    """Checks keys against the registry."""

    def __init__(
        self,
        *,
        keys: AdminKeys,
        registry: Registry,
        gateways: Gateways,
        live: Iterable[LiveKey] = (),
    ) -> None:
        self._keys = keys
        self._live = LiveKeys(live)
        self._registry = registry
        self._gateways = gateways

    def check_admin(self, headers: Mapping[str, str]) -> None:
        """Return if the request carries an admin key.

        Raises:
            RefusedError: 401, it does not.
        """
        if not self.is_admin(headers):
            raise unauthorized("the admin API needs the admin key as a bearer token")

    def is_admin(self, headers: Mapping[str, str]) -> bool:
        """Whether the request carries an admin key; each is compared, so the time says nothing."""
        return any([self._keys.is_valid(key) for key in _keys_in(headers)])

    def key_in(self, headers: Mapping[str, str]) -> str | None:
        """The agent's key in the headers of a request; None if there is none.

        Of several, it is the first that opens an episode or is live here; or else the first that
        has the form of an episode's key, which another gateway may know.
        """
        keys = _keys_in(headers)
        if len(keys) <= 1:
            return keys[0] if keys else None
        known = [key for key in keys if self.is_agents_key(key)]
        formed = [key for key in keys if _EPISODE_ID.fullmatch(key.rpartition(".")[0])]
        return next(iter((*known, *formed, *keys)))

    def is_proven_key(self, key: str) -> bool:
        """Whether a key derives from a valid admin key, or is live: known without any record."""
        return self._live.policy(key) is not None or self._keys.episode_of(key) is not None

    def live_caller(self, key: str | None, scope: Scope) -> LiveCaller | None:
        """Who sends a request with this key; None if it is no live key.

        Raises:
            RefusedError: 400, as `LiveCaller`.
        """
        policy = self._live.policy(key)
        if policy is None:
            return None
        return LiveCaller(policy=policy, session=headers_of(scope).get(SESSION_HEADER, ""))

    def is_agents_key(self, key: str | None) -> bool:
        """Whether this is a live key, or the key of an episode, open or ended."""
        return self._live.policy(key) is not None or self._episode_of(key) is not None

    def sealed(self, number: int) -> str:
        """This number with its proofs, for another gateway of the run."""
        return " ".join((str(number), *self._keys.seals_of(str(number))))

    def unsealed(self, text: str) -> int:
        """The number that another gateway of the run has sealed; 0 for what a client makes up."""
        number, *proofs = text.split(" ")[: 1 + _SEALS_MAX]
        is_sealed = number.isdecimal() and any(self._keys.seals(each, number) for each in proofs)
        return int(number) if is_sealed else 0

    def episode(self, key: str | None) -> HeldEpisode:
        """The open episode that this key belongs to.

        Raises:
            RefusedError: 401 wrong key, 404 unknown, 409 ended, replaced, or imported and not to
                be trained, 410 group over.
        """
        episode_id = self._episode_of(key)
        if episode_id is None:
            raise no_episode_key()
        episode = self.known_episode(episode_id)
        _check_not_closed(episode)
        facts = self._registry.groups[episode.opened.group_id].facts
        if facts.source == "import" and facts.purpose != "train":
            raise conflict(f"episode {episode_id} is imported: it takes no request of an agent")
        return episode

    def check_reply(self, episode: HeldEpisode, *, is_given: bool) -> None:
        """Return if the request brings its reply, in an import that trains; in no other episode.

        Raises:
            RefusedError: 400: it does not, or it must not.
        """
        facts = self._registry.groups[episode.opened.group_id].facts
        if is_given == (facts.source == "import"):
            return
        if is_given:
            rule = "must be left out: the replies of this episode are sampled"
        else:
            rule = "must be given: this episode is imported, and its replies are read"
        raise invalid(f"forgemq_reply {rule}", param="forgemq_reply")

    def check_open(self, episode: HeldEpisode) -> None:
        """Return if an episode whose key was checked is still open.

        Raises:
            MovedError: its group left, also if it came back since: its episodes were read again.
            RefusedError: as `episode`.
        """
        self.check_here(episode.opened.group_id)
        known = self._registry.episode(episode.episode_id)
        if known is None:
            raise self._refusal_of(episode.episode_id)
        if known is not episode:
            raise MovedError(episode.opened.group_id)
        _check_not_closed(known)

    def _episode_of(self, key: str | None) -> str | None:
        """The episode whose key this is: by the admin keys, or by the hash in its own record.

        The record knows a key that derives from an admin key which is valid no more.
        """
        if key is None:
            return None
        return self._keys.episode_of(key) or self._recorded(key)

    def _recorded(self, key: str) -> str | None:
        episode_id = key.rpartition(".")[0]
        if _EPISODE_ID.fullmatch(episode_id) is None:
            return None
        episode = self._registry.episode(episode_id)
        if episode is None:
            return None
        is_its = hmac.compare_digest(episode.opened.key_sha256, key_sha256(key))
        return episode_id if is_its else None

    def known_episode(self, episode_id: str) -> HeldEpisode:
        """The episode with this id, whatever its state.

        Raises:
            RefusedError: 404 unknown, 409 replaced, 410 group over.
        """
        if _EPISODE_ID.fullmatch(episode_id) is None:
            raise unknown(f"there is no episode {episode_id}")
        self.check_here(group_of_episode(episode_id))
        episode = self._registry.episode(episode_id)
        if episode is not None:
            return episode
        raise self._refusal_of(episode_id)

    def check_here(self, group_id: str) -> None:
        """Return if this gateway owns the group.

        Raises:
            MovedError: another one does.
        """
        if self._gateways.tenure(group_id) is None:
            raise MovedError(group_id)

    def tenure(self, group_id: str) -> int:
        """Which time it is that this gateway owns the group (`Gateways.tenure`).

        Raises:
            MovedError: another gateway owns it.
        """
        tenure = self._gateways.tenure(group_id)
        if tenure is None:
            raise MovedError(group_id)
        return tenure

    def is_still(self, tenure: int, group_id: str) -> bool:
        """Whether it is still the same time; a later one has read the group's records again."""
        return self._gateways.tenure(group_id) == tenure

    def _refusal_of(self, episode_id: str) -> RefusedError:
        """Why there is no such attempt now; its id is well-formed."""
        group_id, index, attempt = episode_id.rsplit(".", 2)
        if group_id in self._registry.retired:
            return gone(f"group {group_id} is over")
        group = self._registry.groups.get(group_id)
        newest = None if group is None else group.episodes.get(int(index))
        if newest is None:
            return unknown(f"there is no episode {episode_id}")
        if newest.opened.attempt > int(attempt):
            return conflict(f"episode {episode_id} was replaced by {newest.episode_id}")
        return unknown(f"there is no episode {episode_id}")


def _check_not_closed(episode: HeldEpisode) -> None:
    if episode.is_closed:
        raise conflict(f"episode {episode.episode_id} has ended")


def no_episode_key() -> RefusedError:
    """401 for an agent without the key of an episode."""
    return unauthorized("no valid episode key: send it as bearer token, x-api-key or in /s/")


def _keys_in(headers: Mapping[str, str]) -> list[str]:
    """What may be a key in the headers of a request: bare, or as a bearer token."""
    keys = []
    for name in _KEY_HEADERS:
        value = headers.get(name)
        if value:
            scheme, _, rest = value.strip().partition(" ")
            if scheme.lower() == "bearer":
                value = rest.strip()
            elif rest and name == "authorization":
                value = ""  # Of another scheme.
            if value:
                keys.append(value)
    return keys
