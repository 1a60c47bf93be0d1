"""The keys that sign and verify tokens, loaded from the files and variables that `auth.keys` names.

An error names every key that cannot be used, and never what the key contains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from price_keeper.config.config_sections import DEFAULT_KEYS, AuthConfig
from price_keeper.config.config_sections import KeyConfig as KeyConfig
from price_keeper.errors import ConfigError

MIN_HS256_SECRET_BYTES = 32  # as long as the hash of HS256; a shorter secret is easier to guess
MIN_RSA_BITS = 2048

_KEY_TYPES: dict[str, tuple[type, type]] = {
    "EdDSA": (Ed25519PrivateKey, Ed25519PublicKey),
    "RS256": (RSAPrivateKey, RSAPublicKey),
}


@dataclass(frozen=True, slots=True)
class SigningKey:
    """`signs_with` is None if this process has only the public half of the key."""

    kid: str
    alg: str
    verifies_with: Any = field(repr=False)
    signs_with: Any = field(repr=False)


def load_needed_keys(auth: AuthConfig, environ: Mapping[str, str]) -> tuple[SigningKey, ...]:
    """Load the configured keys, or none with `mode: identity` if none is configured: it verifies no tokens.

    Raises ConfigError like `load_keys`.
    """
    is_configured = auth.keys != DEFAULT_KEYS or any(environ.get(str(key.secret_env)) for key in auth.keys)
    return load_keys(auth.keys, environ) if is_configured or auth.mode != "identity" else ()


def load_keys(configured: Sequence[KeyConfig], environ: Mapping[str, str]) -> tuple[SigningKey, ...]:
    """Load the configured keys. Raises ConfigError that names every unusable key, and never what it contains."""
    keys, problems = [], []
    for number, key in enumerate(configured):
        try:
            keys.append(_load_key(key, environ))
        except _UnusableKey as failure:
            problems.append(f"auth.keys.{number} ({key.kid}): {failure}")
    if problems:
        raise ConfigError(problems)
    return tuple(keys)


class _UnusableKey(Exception):
    pass


def _load_key(key: KeyConfig, environ: Mapping[str, str]) -> SigningKey:
    if key.alg == "HS256":
        secret = _read_source(key.secret_env, key.secret_file, environ).strip()
        if len(secret) < MIN_HS256_SECRET_BYTES:
            raise _UnusableKey(f"a secret for HS256 needs at least {MIN_HS256_SECRET_BYTES} bytes")
        return SigningKey(key.kid, key.alg, secret, secret)
    private_type, public_type = _KEY_TYPES[key.alg]
    if key.public_key_file is not None:
        public = _parse_pem(load_pem_public_key, _read_source(None, key.public_key_file, environ), public_type, key.alg)
        return SigningKey(key.kid, key.alg, public, None)
    pem = _read_source(key.private_key_env, key.private_key_file, environ)
    private = _parse_pem(lambda text: load_pem_private_key(text, None), pem, private_type, key.alg)
    return SigningKey(key.kid, key.alg, private.public_key(), private)


def _parse_pem(load: Any, pem: bytes, key_type: type, alg: str) -> Any:
    try:
        parsed = load(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise _UnusableKey("expected a key in PEM form without a passphrase") from None
    if not isinstance(parsed, key_type):
        raise _UnusableKey(f"the key is of another type than {alg} needs")
    if isinstance(parsed, (RSAPrivateKey, RSAPublicKey)) and parsed.key_size < MIN_RSA_BITS:
        raise _UnusableKey(f"a key for RS256 needs at least {MIN_RSA_BITS} bits")
    return parsed


def _read_source(variable: str | None, file: str | None, environ: Mapping[str, str]) -> bytes:
    if file is not None:
        try:
            return Path(file).read_bytes()
        except OSError as failure:
            raise _UnusableKey(f"cannot read {file}: {failure.strerror}") from None
    assert variable is not None
    if not environ.get(variable):
        raise _UnusableKey(f"the environment variable {variable} is not set")
    return environ[variable].encode()
