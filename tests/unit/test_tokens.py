"""Access tokens: good ones name their caller, and nothing else gets through."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from jwt.algorithms import OKPAlgorithm
from price_keeper.auth import tokens as module
from price_keeper.auth.signing_keys import SigningKey, load_keys
from price_keeper.auth.tokens import REFRESH_SECONDS, TokenService
from price_keeper.config.config_sections import AuthConfig, KeyConfig
from price_keeper.domain import Caller
from price_keeper.errors import AccessDenied, ConfigError, TokenExpired

ORG = "550e8400-e29b-41d4-a716-446655440000"
SECRET = b"a secret that is long enough for HS256, and for HS512, which nobody asked for"
NOW = 1_800_000_000


class Time:
    now = float(NOW)

    def __call__(self) -> float:
        return self.now


def hs256(kid: str = "k1", secret: bytes = SECRET) -> SigningKey:
    return SigningKey(kid, "HS256", secret, secret)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def tokens(time: Time) -> TokenService:
    return TokenService([hs256()], "price-keeper", time)


def claims(**changes: Any) -> dict[str, Any]:
    good = {
        "iss": "price-keeper",
        "aud": "price-keeper",
        "sub": f"org-{ORG}-app-web",
        "iat": NOW,
        "exp": NOW + 3600,
        "jti": "1",
        "org_id": ORG,
        "app_id": "web",
        "scope": "access",
    }
    return {name: value for name, value in (good | changes).items() if value is not None}


def signed(key: Any = SECRET, alg: str = "HS256", kid: Any = "k1", **changes: Any) -> str:
    return jwt.encode(claims(**changes), key, alg, headers={"kid": kid})


@pytest.mark.parametrize("app", ["web", None])
def test_minted_token_names_its_caller_until_expiry(tokens: TokenService, time: Time, app: str | None) -> None:
    minted = tokens.mint_access(ORG, app)
    suffix = "" if app is None else f"-app-{app}"
    for _ in range(2):
        assert tokens.verify_caller(minted.token) == Caller(ORG, app, f"org-{ORG}{suffix}")
    assert minted.expires == NOW + 3600
    time.now = NOW + 3599.9
    tokens.verify_caller(minted.token)
    time.now = NOW + 3600.0
    for _ in range(2):  # first from the cache, then verified again
        with pytest.raises(TokenExpired):
            tokens.verify_caller(minted.token)


def test_tokens_are_unique(tokens: TokenService) -> None:
    assert tokens.mint_access(ORG, "web").token != tokens.mint_access(ORG, "web").token


def _unsigned(header: dict[str, Any]) -> str:
    parts = (json.dumps(part).encode() for part in (header, claims()))
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts) + "."


def _tampered(token: str) -> str:
    head, _, signature = token.split(".")
    wrong = base64.urlsafe_b64encode(json.dumps(claims(app_id="other", sub=f"org-{ORG}-app-other")).encode())
    return ".".join((head, wrong.rstrip(b"=").decode(), signature))


def _bringing_its_key() -> str:
    """Signed correctly, with a key that only the token itself names."""
    own = Ed25519PrivateKey.generate()
    jwk = json.loads(OKPAlgorithm.to_jwk(own.public_key()))
    return jwt.encode(claims(), own, "EdDSA", headers={"kid": "k1", "jwk": jwk, "jku": "https://evil.example/jwks"})


BAD: dict[str, Callable[[], str]] = {
    "nothing": lambda: "",
    "no token at all": lambda: "AKIAIOSFODNN7EXAMPLE",
    "text of odd characters": lambda: "ä.ö.ü",
    "no algorithm": lambda: _unsigned({"alg": "none", "kid": "k1"}),
    "no key id": lambda: jwt.encode(claims(), SECRET, "HS256"),
    "a key nobody knows": lambda: signed(kid="k2"),
    "a key id that is a path": lambda: signed(kid="../../dev/null"),
    "a key id that is a path to a key": lambda: signed(kid="/etc/price-keeper/jwt.pub"),
    "a key id with a null in it": lambda: signed(kid="k1\0"),
    "a key id that asks for more": lambda: signed(kid="k1' OR '1'='1"),
    "an empty key id": lambda: signed(kid=""),
    "a key that it brings along": lambda: _bringing_its_key(),
    "a key id that is a list": lambda: _unsigned({"alg": "HS256", "kid": ["k1"]}),
    "another secret": lambda: signed(b"another secret that is long enough"),
    "another algorithm": lambda: signed(alg="HS512"),
    "a changed body": lambda: _tampered(signed()),
    "no signature": lambda: signed().rpartition(".")[0] + ".",
    "another issuer": lambda: signed(iss="somebody"),
    "another audience": lambda: signed(aud="somewhere"),
    "made in the future": lambda: signed(iat=NOW + 60),
    "not good before a while": lambda: signed(nbf=NOW + 60),
    "a broken beginning": lambda: signed(nbf="soon"),
    "a time of making that is no number": lambda: signed(iat="now"),
    "an expiry that is true": lambda: signed(exp=True),
    "longer than any of ours": lambda: signed(note="x" * module.MAX_TOKEN_CHARS),
    "no expiry": lambda: signed(exp=None),
    "a broken expiry": lambda: signed(exp=NOW + 0.5),
    "no id": lambda: signed(jti=None),
    "an id that no key of the store may hold": lambda: signed(jti="SID#1"),
    "an id without end": lambda: signed(jti="1" * 65),
    "an id that is no text": lambda: signed(jti=5),
    "a session that no key of the store may hold": lambda: signed(sid="a#b"),
    "a session that is no text": lambda: signed(sid=5),
    "no org": lambda: signed(org_id=None),
    "an org that is none": lambda: signed(org_id="acme", sub="org-acme-app-web"),
    "an org that is no text": lambda: signed(org_id=5),
    "an app with #": lambda: signed(app_id="a#b", sub=f"org-{ORG}-app-a#b"),
    "a subject of another app": lambda: signed(sub=f"org-{ORG}-app-other"),
    "a refresh token": lambda: signed(scope="refresh", sid="s1"),
    "a token for both": lambda: signed(scope=["access", "refresh"]),
    "no scope": lambda: signed(scope=None),
}


@pytest.mark.parametrize("make", BAD.values(), ids=BAD.keys())
def test_invalid_token_is_refused_without_reason(tokens: TokenService, make: Callable[[], str]) -> None:
    token = make()
    with pytest.raises(AccessDenied, match=r"^the token is not good: ask for a new one$"):
        tokens.verify_caller(token)


def test_expired_token_of_other_key_is_not_called_expired(tokens: TokenService) -> None:
    with pytest.raises(AccessDenied):
        tokens.verify_caller(signed(b"another secret that is long enough", exp=NOW - 1))


def test_rotated_keys_sign_with_first_and_verify_all(time: Time) -> None:
    old, new = hs256("old"), hs256("new", b"a new secret, long enough for HS256 too")
    before = TokenService([old], "price-keeper", time).mint_access(ORG, "web").token
    during = TokenService([new, old], "price-keeper", time)
    assert during.verify_caller(before).app == "web"
    assert jwt.get_unverified_header(during.mint_access(ORG, "web").token)["kid"] == "new"
    with pytest.raises(AccessDenied):
        TokenService([new], "price-keeper", time).verify_caller(before)


def test_claims_cache_is_bounded(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CACHED_TOKENS", 10)
    tokens = TokenService([hs256()], "price-keeper", time)
    minted = [tokens.mint_access(ORG, f"app{number}").token for number in range(50)]
    for token in minted:
        tokens.verify_caller(token)
    assert len(tokens._cached_claims) <= 10
    assert [tokens.verify_caller(token).app for token in minted] == [f"app{number}" for number in range(50)]


# Refresh tokens.


def test_refresh_token_lasts_thirty_days_and_is_no_access_token(tokens: TokenService, time: Time) -> None:
    minted = tokens.mint_refresh(ORG, "web", "s1")
    found = tokens.verify_refresh(minted.token)
    assert (found.caller.app, found.sid, found.purpose, found.expires) == ("web", "s1", "refresh", NOW + 30 * 86_400)
    assert tokens.verify_any(minted.token) == found
    with pytest.raises(AccessDenied):
        tokens.verify_access(minted.token)
    time.now = minted.expires
    with pytest.raises(TokenExpired):
        tokens.verify_refresh(minted.token)
    with pytest.raises(AccessDenied):  # and not that it has expired
        tokens.verify_access(minted.token)


def test_refresh_lifetime_without_configuration_is_thirty_days_everywhere() -> None:
    assert AuthConfig().refresh_seconds == REFRESH_SECONDS == 30 * 86_400


def test_cached_access_token_does_not_refresh(tokens: TokenService) -> None:
    access = tokens.mint_access(ORG, "web", sid="s1").token
    assert tokens.verify_access(access).sid == "s1"
    with pytest.raises(AccessDenied):
        tokens.verify_refresh(access)


@pytest.mark.parametrize("sid", [None, "a#b", ""])
def test_refresh_token_requires_a_session(tokens: TokenService, sid: str | None) -> None:
    with pytest.raises(AccessDenied):
        tokens.verify_refresh(signed(scope="refresh", sid=sid))


def test_token_lifetimes_are_configurable(time: Time) -> None:
    short = TokenService([hs256()], "price-keeper", time, access_seconds=2, refresh_seconds=3)
    assert short.mint_access(ORG, None).expires == NOW + 2
    assert short.mint_refresh(ORG, None, "s1").expires == NOW + 3


def test_unused_signature_bits_make_no_other_token(tokens: TokenService) -> None:
    """Its last letter has bits that decoders pass over, so that four letters would do."""
    token = tokens.mint_access(ORG, "web").token
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    good = []
    for letter in letters:
        with suppress(AccessDenied):
            good.append(tokens.verify_caller(token[:-1] + letter))
    assert len(good) == 1


# Keys of two halves, and where keys come from.


def pems(private: Any) -> tuple[bytes, bytes]:
    secret = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return secret, private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


PRIVATE = {"EdDSA": Ed25519PrivateKey.generate(), "RS256": generate_private_key(65537, 2048)}


@pytest.mark.parametrize("alg", PRIVATE)
def test_public_key_verifies_and_cannot_mint(alg: str, tmp_path: Path, time: Time) -> None:
    private, public = pems(PRIVATE[alg])
    (tmp_path / "public.pem").write_bytes(public)
    mint = TokenService(load_keys([KeyConfig("k", alg, private_key_env="PEM")], {"PEM": private.decode()}), "i", time)  # type: ignore[arg-type]
    verify = TokenService(load_keys([KeyConfig("k", alg, public_key_file=str(tmp_path / "public.pem"))], {}), "i", time)  # type: ignore[arg-type]
    assert verify.verify_caller(mint.mint_access(ORG, "web").token).app == "web"
    with pytest.raises(AccessDenied):
        verify.mint_access(ORG, "web")


def test_public_key_is_not_accepted_as_hmac_secret(time: Time) -> None:
    """The old trick: a token signed by HS256 with the public key, which everybody has."""
    _, public = pems(PRIVATE["RS256"])
    tokens = TokenService([SigningKey("k", "RS256", PRIVATE["RS256"].public_key(), None)], "price-keeper", time)
    head = base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "kid": "k"}).encode()).rstrip(b"=")
    body = base64.urlsafe_b64encode(json.dumps(claims()).encode()).rstrip(b"=")
    mac = base64.urlsafe_b64encode(hmac.digest(public, head + b"." + body, hashlib.sha256)).rstrip(b"=")
    with pytest.raises(AccessDenied):
        tokens.verify_caller(b".".join((head, body, mac)).decode())


def test_jwks_contains_public_keys_only(time: Time) -> None:
    keys = [SigningKey(alg, alg, PRIVATE[alg].public_key(), PRIVATE[alg]) for alg in PRIVATE]
    jwks = TokenService([*keys, hs256()], "price-keeper", time).build_jwks()
    assert [(key["kid"], key["alg"], key["use"]) for key in jwks["keys"]] == [
        ("EdDSA", "EdDSA", "sig"),
        ("RS256", "RS256", "sig"),
    ]
    assert [set(key) - {"kid", "alg", "use"} for key in jwks["keys"]] == [{"kty", "crv", "x"}, {"kty", "n", "e"}]
    assert base64.urlsafe_b64encode(SECRET).decode().rstrip("=") not in json.dumps(jwks)
    for key in keys:
        token = TokenService([key], "price-keeper", time).mint_access(ORG, "web").token
        known = jwt.PyJWKSet.from_dict(jwks)[key.kid]
        assert jwt.decode(token, known, audience="price-keeper", options={"verify_exp": False, "verify_iat": False})
    assert TokenService([hs256()], "price-keeper", time).build_jwks() == {"keys": []}


def test_key_of_one_algorithm_signs_for_no_other(time: Time) -> None:
    """An HS256 token under the kid of an RSA key, with the secret of another key of ours."""
    tokens = TokenService(
        [SigningKey("rsa", "RS256", PRIVATE["RS256"].public_key(), None), hs256()], "price-keeper", time
    )
    tokens.verify_caller(signed(kid="k1"))
    with pytest.raises(AccessDenied):
        tokens.verify_caller(signed(kid="rsa"))
    with pytest.raises(AccessDenied):
        tokens.verify_caller(signed(PRIVATE["RS256"], "RS256", kid="k1"))


def test_unavailable_keys_are_all_reported_and_redacted(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "rsa").write_bytes(pems(PRIVATE["RS256"])[0])
    (tmp_path / "small").write_bytes(pems(generate_private_key(65537, 1024))[0])
    with pytest.raises(ConfigError) as caught:
        load_keys(
            [
                KeyConfig("unset", "HS256", secret_env="NOT_SET"),
                KeyConfig("short", "HS256", secret_env="SHORT"),
                KeyConfig("gone", "HS256", secret_file=str(tmp_path / "nowhere")),
                KeyConfig("empty", "EdDSA", private_key_file=str(tmp_path / "empty")),
                KeyConfig("mixed", "EdDSA", private_key_file=str(tmp_path / "rsa")),
                KeyConfig("small", "RS256", private_key_file=str(tmp_path / "small")),
            ],
            {"SHORT": "hunter2"},
        )
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        f"auth.keys.{number} ({kid})"
        for number, kid in enumerate(["unset", "short", "gone", "empty", "mixed", "small"])
    ]
    assert "hunter2" not in str(caught.value)
    assert "PRIVATE" not in str(caught.value)
    assert SECRET.decode() not in repr(hs256())


def spelled(header: bytes) -> str:
    return base64.urlsafe_b64encode(header).rstrip(b"=").decode() + ".e30.AA"


@pytest.mark.parametrize(
    "header",
    [b'{"kid":' + b"[" * 5000 + b"]" * 5000 + b"}", b"[" * 9000, b'{"kid":' + b"9" * 6000 + b"}", b"{" * 20_000],
)
def test_token_with_huge_header_is_refused(tokens: TokenService, header: bytes) -> None:
    with pytest.raises(AccessDenied):
        tokens.verify_caller(spelled(header))


@pytest.mark.parametrize("junk", ["!", "!" * 50_000, "\n", " ", "=", "\u00e9", "."])
def test_token_has_one_spelling(tokens: TokenService, junk: str) -> None:
    """Decoders pass over some characters; each such spelling would be remembered as a token of its own."""
    token = tokens.mint_access(ORG, "web").token
    tokens.verify_caller(token)
    head, payload, signature = token.split(".")
    for changed in (token + junk, f"{head}{junk}.{payload}.{signature}", f"{head}.{payload}{junk}.{signature}"):
        with pytest.raises(AccessDenied):
            tokens.verify_caller(changed)
    assert list(tokens._cached_claims) == [token]
