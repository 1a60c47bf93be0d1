"""The public halves of our keys as a JWKS document, so that others can verify what they cannot mint. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jwt.algorithms import OKPAlgorithm, RSAAlgorithm

from price_keeper.auth.keys import SigningKey

_JWK_ALGORITHMS: dict[str, Any] = {"EdDSA": OKPAlgorithm, "RS256": RSAAlgorithm}
_PUBLIC_FIELDS = ("kty", "crv", "x", "n", "e")  # whatever else a library tells of a key stays here


def build_jwks(keys: Iterable[SigningKey]) -> dict[str, list[dict[str, str]]]:
    """A secret shared for HS256 has no public half, and is not told of."""
    return {"keys": [_build_jwk(key) for key in keys if key.alg in _JWK_ALGORITHMS]}


def _build_jwk(key: SigningKey) -> dict[str, str]:
    jwk: dict[str, Any] = _JWK_ALGORITHMS[key.alg].to_jwk(key.verifies_with, as_dict=True)
    return {"kid": key.kid, "alg": key.alg, "use": "sig"} | {name: jwk[name] for name in _PUBLIC_FIELDS if name in jwk}
