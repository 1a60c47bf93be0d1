"""A MAC tag within each secret that is made here, so that an invented secret is recognized without the store.

A secret has 32 bytes: 24 random ones and an 8-byte tag, a keyed hash of them and of the secret's purpose. The tag
authorizes nothing: a tagged secret skips the lookup throttle and is still verified. Secrets without a tag, as older
versions made them, wait for the throttle (`throttles.py`). The keys are derived from those that sign tokens, so
every process that makes or verifies secrets has them.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from price_keeper.auth.signing_keys import SigningKey

_TAG_BYTES = 8  # one invention in 2**64 passes and has to be looked up
_RANDOM_BYTES = 24
_HKDF_LABEL = b"price-keeper marks of secrets"


class SecretTagger:
    """Tags secrets with the first key that can sign, and recognises tags of all of them. Without keys, it adds none."""

    def __init__(self, keys: Iterable[SigningKey] = ()) -> None:
        self._keys = [_derive_key(_read_key_material(key.signs_with)) for key in keys if key.signs_with is not None]

    def make_secret(self, purpose: str) -> bytes:
        """Return 32 random bytes, tagged for `purpose`; the tag is valid for no other purpose."""
        if not self._keys:
            return secrets.token_bytes(_RANDOM_BYTES + _TAG_BYTES)
        random = secrets.token_bytes(_RANDOM_BYTES)
        return random + _compute_tag(self._keys[0], purpose, random)

    def is_tagged(self, purpose: str, secret: bytes) -> bool:
        """Whether the secret was made with one of these keys and for this purpose."""
        random, tag = secret[:_RANDOM_BYTES], secret[_RANDOM_BYTES:]
        return any(hmac.compare_digest(tag, _compute_tag(key, purpose, random)) for key in self._keys)


NO_TAGS = SecretTagger()


def _compute_tag(key: bytes, purpose: str, random: bytes) -> bytes:
    return hmac.digest(key, purpose.encode() + b"\0" + random, "sha256")[:_TAG_BYTES]


def _derive_key(material: bytes) -> bytes:
    return HKDF(SHA256(), length=32, salt=None, info=_HKDF_LABEL).derive(material)


def _read_key_material(private: object) -> bytes:
    if isinstance(private, Ed25519PrivateKey):
        return private.private_bytes_raw()
    if isinstance(private, RSAPrivateKey):
        return private.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    assert isinstance(private, (bytes, str))
    return private.encode() if isinstance(private, str) else private
