"""The admin keys as hashes, and the episode keys that derive from them.

A derived key survives a restart without being stored: the log has its hash.
"""

import hashlib
import hmac
from collections.abc import Sequence
from typing import NamedTuple

from forgemq_contracts.fields import EpisodeId

# 128 bits of the MAC: too many to guess, and a key stays short enough for a URL.
_MAC_HEX = 32

_DIGEST_BYTES = 32


class AdminKeys:
    """The admin keys that are valid now, kept as keyed hashes.

    Several are valid while one replaces another. Example: of the keys (new, old) both open the
    admin API, keys of episodes derive from the new one, and those of the old one are known still.

    Args:
        lasting: Keys that are valid as long as the process lives, behind all others.
        run: As `KeyMint`.
    """

    def __init__(self, lasting: Sequence[str], *, run: str) -> None:
        self._run = run
        self._lasting = tuple(self._known(key) for key in lasting)
        self._keys = self._lasting

    def replace(self, keys: Sequence[str]) -> None:
        """Let these and the lasting ones be valid from now on; episode keys derive from the first.

        Afterwards there must be at least one key.
        """
        self._keys = (*(self._known(key) for key in keys), *self._lasting)

    def is_valid(self, key: str) -> bool:
        """Whether this is an admin key; every one is compared, so the time says nothing."""
        digest = self._digest(key)
        return any([hmac.compare_digest(digest, known.digest) for known in self._keys])

    def key_of(self, episode_id: EpisodeId) -> str:
        """The key of this episode, if it is opened now."""
        return self._keys[0].mint.key_of(episode_id)

    def episode_of(self, key: str) -> EpisodeId | None:
        """The episode whose key this is; None for a key that derives from none of these."""
        found = [known.mint.episode_of(key) for known in self._keys]
        return next((episode for episode in found if episode is not None), None)

    def seals_of(self, text: str) -> tuple[str, ...]:
        """Proofs that a text comes from a process of this run, one by each admin key.

        While one key replaces another, two processes may have only one of them in common.
        """
        return tuple(known.seal.seal_of(text) for known in self._keys)

    def seals(self, proof: str, text: str) -> bool:
        """Whether this is one of the proofs of this text."""
        found = [hmac.compare_digest(proof.encode(), own.encode()) for own in self.seals_of(text)]
        return any(found)

    def _known(self, key: str) -> "_KnownKey":
        return _KnownKey(
            digest=self._digest(key),
            mint=KeyMint(key, run=self._run),
            seal=Seal(key, run=self._run),
        )

    def _digest(self, key: str) -> bytes:
        # Keyed with the run: the same admin key has another hash in another run.
        return hashlib.blake2b(
            key.encode(), digest_size=_DIGEST_BYTES, key=hashlib.sha256(self._run.encode()).digest()
        ).digest()


class _KnownKey(NamedTuple):
    """What is kept of one admin key."""

    digest: bytes
    mint: "KeyMint"
    seal: "Seal"


class KeyMint:
    """Makes and checks episode keys.

    A key is `<episode id>.<mac>`. It names its episode, so a gateway that has just started can
    distinguish a wrong key from the key of an episode that is over.

    Args:
        secret: The admin key; keys cannot be computed without it and do not reveal it.
        run: Keys of one run do not open another run.
    """

    def __init__(self, secret: str, *, run: str) -> None:
        derived = hashlib.blake2b(
            secret.encode(),
            key=b"forgemq episode keys",
            salt=hashlib.sha256(run.encode()).digest()[:16],
        ).digest()
        # Copied for each key: every request proves one, and to prepare the secret is most of it.
        self._begun = hmac.new(derived, digestmod="sha256")

    def key_of(self, episode_id: EpisodeId) -> str:
        """The key of this episode."""
        mac = self._begun.copy()
        mac.update(episode_id.encode())
        return f"{episode_id}.{mac.hexdigest()[:_MAC_HEX]}"

    def episode_of(self, key: str) -> EpisodeId | None:
        """The episode whose key this is; None for a wrong key, in the same time."""
        episode_id = key.rpartition(".")[0]
        if not key.isascii() or not hmac.compare_digest(key, self.key_of(episode_id)):
            return None
        return episode_id


class Seal:
    """Marks what one gateway of a run says to another, so that no client can say it.

    Args:
        secret: The admin key, which all gateways of the run have.
        run: What one run seals is not believed in another.
    """

    def __init__(self, secret: str, *, run: str) -> None:
        self._secret = hashlib.blake2b(
            secret.encode(),
            key=b"forgemq words of gateways",
            salt=hashlib.sha256(run.encode()).digest()[:16],
        ).digest()

    def seal_of(self, text: str) -> str:
        """The proof of this text."""
        return hmac.digest(self._secret, text.encode(), "sha256").hex()[:_MAC_HEX]


def key_sha256(key: str) -> str:
    """What the log carries of a key."""
    return hashlib.sha256(key.encode()).hexdigest()
