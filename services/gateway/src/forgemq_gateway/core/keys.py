"""Episode keys: derived from the admin key, so they survive a restart; the log has their hash."""

import hashlib
import hmac

from forgemq_contracts.fields import EpisodeId

# 128 bits of the MAC: too many to guess, and a key stays short enough for a URL.
_MAC_HEX = 32


class KeyMint:
    """Makes and checks episode keys.

    A key is `<episode id>.<mac>`. It names its episode, so a gateway that has just started can
    distinguish a wrong key from the key of an episode that is over.

    Args:
        secret: The admin key; keys cannot be computed without it and do not reveal it.
        run: Keys of one run do not open another run.
    """

    def __init__(self, secret: str, *, run: str) -> None:
        self._secret = hashlib.blake2b(
            secret.encode(),
            key=b"forgemq episode keys",
            salt=hashlib.sha256(run.encode()).digest()[:16],
        ).digest()

    def key_of(self, episode_id: EpisodeId) -> str:
        """The key of this episode."""
        mac = hmac.new(self._secret, episode_id.encode(), hashlib.sha256).hexdigest()
        return f"{episode_id}.{mac[:_MAC_HEX]}"

    def episode_of(self, key: str) -> EpisodeId | None:
        """The episode whose key this is; None for a wrong key, in the same time."""
        episode_id = key.rpartition(".")[0]
        if not key.isascii() or not hmac.compare_digest(key, self.key_of(episode_id)):
            return None
        return episode_id


def key_sha256(key: str) -> str:
    """What the log carries of a key."""
    return hashlib.sha256(key.encode()).hexdigest()
