"""The keys that tokens are signed and verified with, loaded from where the configuration says they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from price_keeper.config.keys import KeyConfig as KeyConfig
from price_keeper.errors import ConfigError

SHORTEST_SECRET = 32  # bytes: as long as the hash of HS256, below which guessing gets easier
SMALLEST_RSA = 2048

_KINDS: dict[str, tuple[type, type]] = {
    "EdDSA": (Ed25519PrivateKey, Ed25519PublicKey),
    "RS256": (RSAPrivateKey, RSAPublicKey),
}


@dataclass(frozen=True, slots=True)
class SigningKey:
    """`signs_with` is None for a key of which this process has the public half alone."""

    kid: str
    alg: str
    verifies_with: Any = field(repr=False)
    signs_with: Any = field(repr=False)


def load_keys(configured: Sequence[KeyConfig], environ: Mapping[str, str]) -> tuple[SigningKey, ...]:
    """Raises ConfigError that names every key which cannot be had, and never what it holds."""
    keys, problems = [], []
    for number, key in enumerate(configured):
        try:
            keys.append(_load(key, environ))
        except _Unusable as failure:
            problems.append(f"auth.keys.{number} ({key.kid}): {failure}")
    if problems:
        raise ConfigError(problems)
    return tuple(keys)


class _Unusable(Exception):
    pass


def _load(key: KeyConfig, environ: Mapping[str, str]) -> SigningKey:
    if key.alg == "HS256":
        secret = _read(key.secret_env, key.secret_file, environ).strip()
        if len(secret) < SHORTEST_SECRET:
            raise _Unusable(f"a secret for HS256 has at least {SHORTEST_SECRET} bytes")
        return SigningKey(key.kid, key.alg, secret, secret)
    private_kind, public_kind = _KINDS[key.alg]
    if key.public_key_file is not None:
        public = _parsed(load_pem_public_key, _read(None, key.public_key_file, environ), public_kind, key.alg)
        return SigningKey(key.kid, key.alg, public, None)
    pem = _read(key.private_key_env, key.private_key_file, environ)
    private = _parsed(lambda text: load_pem_private_key(text, None), pem, private_kind, key.alg)
    return SigningKey(key.kid, key.alg, private.public_key(), private)


def _parsed(load: Any, pem: bytes, kind: type, alg: str) -> Any:
    try:
        found = load(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise _Unusable("this is no key in PEM form without a passphrase") from None
    if not isinstance(found, kind):
        raise _Unusable(f"this is no key for {alg}")
    if isinstance(found, (RSAPrivateKey, RSAPublicKey)) and found.key_size < SMALLEST_RSA:
        raise _Unusable(f"a key for RS256 has at least {SMALLEST_RSA} bits")
    return found


def _read(variable: str | None, file: str | None, environ: Mapping[str, str]) -> bytes:
    if file is not None:
        try:
            return Path(file).read_bytes()
        except OSError as failure:
            raise _Unusable(f"cannot read {file}: {failure.strerror}") from None
    assert variable is not None
    if not environ.get(variable):
        raise _Unusable(f"the environment variable {variable} is not set")
    return environ[variable].encode()
