"""The public halves of our keys as a JWKS document, so that others can verify what they cannot mint. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jwt.algorithms import OKPAlgorithm, RSAAlgorithm

from price_keeper.auth.keys import SigningKey

_KINDS: dict[str, Any] = {"EdDSA": OKPAlgorithm, "RS256": RSAAlgorithm}
_PUBLIC = ("kty", "crv", "x", "n", "e")  # whatever else a library tells of a key stays here


def public_halves(keys: Iterable[SigningKey]) -> dict[str, list[dict[str, str]]]:
    """A secret shared for HS256 has no public half, and is not told of."""
    return {"keys": [_told(key) for key in keys if key.alg in _KINDS]}


def _told(key: SigningKey) -> dict[str, str]:
    found: dict[str, Any] = _KINDS[key.alg].to_jwk(key.verifies_with, as_dict=True)
    return {"kid": key.kid, "alg": key.alg, "use": "sig"} | {name: found[name] for name in _PUBLIC if name in found}
