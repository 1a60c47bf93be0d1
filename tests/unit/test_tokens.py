"""Access tokens: good ones name their caller, and nothing else gets through."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from proxy.auth import tokens as module
from proxy.auth.keys import SigningKey, load_keys
from proxy.auth.tokens import Tokens
from proxy.config.keys import Key
from proxy.errors import AccessDenied, ConfigError, TokenExpired
from proxy.model import Caller

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
def tokens(time: Time) -> Tokens:
    return Tokens([hs256()], "price-keeper", time)


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
def test_a_minted_token_names_its_caller_until_it_expires(tokens: Tokens, time: Time, app: str | None) -> None:
    minted = tokens.mint(ORG, app)
    suffix = "" if app is None else f"-app-{app}"
    for _ in range(2):
        assert tokens.verify(minted.token) == Caller(ORG, app, f"org-{ORG}{suffix}")
    assert minted.expires == NOW + 3600
    time.now = NOW + 3599.9
    tokens.verify(minted.token)
    time.now = NOW + 3600.0
    for _ in range(2):  # first from memory, then anew
        with pytest.raises(TokenExpired):
            tokens.verify(minted.token)


def test_two_tokens_are_never_the_same(tokens: Tokens) -> None:
    assert tokens.mint(ORG, "web").token != tokens.mint(ORG, "web").token


def _unsigned(header: dict[str, Any]) -> str:
    parts = (json.dumps(part).encode() for part in (header, claims()))
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts) + "."


def _tampered(token: str) -> str:
    head, _, signature = token.split(".")
    wrong = base64.urlsafe_b64encode(json.dumps(claims(app_id="other", sub=f"org-{ORG}-app-other")).encode())
    return ".".join((head, wrong.rstrip(b"=").decode(), signature))


BAD: dict[str, Callable[[], str]] = {
    "nothing": lambda: "",
    "no token at all": lambda: "AKIAIOSFODNN7EXAMPLE",
    "text of odd characters": lambda: "ä.ö.ü",
    "no algorithm": lambda: _unsigned({"alg": "none", "kid": "k1"}),
    "no key id": lambda: jwt.encode(claims(), SECRET, "HS256"),
    "a key nobody knows": lambda: signed(kid="k2"),
    "a key id that is a path": lambda: signed(kid="../../dev/null"),
    "a key id that is a list": lambda: _unsigned({"alg": "HS256", "kid": ["k1"]}),
    "another secret": lambda: signed(b"another secret that is long enough"),
    "another algorithm": lambda: signed(alg="HS512"),
    "a changed body": lambda: _tampered(signed()),
    "no signature": lambda: signed().rpartition(".")[0] + ".",
    "another issuer": lambda: signed(iss="somebody"),
    "another audience": lambda: signed(aud="somewhere"),
    "made in the future": lambda: signed(iat=NOW + 60),
    "no expiry": lambda: signed(exp=None),
    "a broken expiry": lambda: signed(exp=NOW + 0.5),
    "no id": lambda: signed(jti=None),
    "no org": lambda: signed(org_id=None),
    "an org that is none": lambda: signed(org_id="acme", sub="org-acme-app-web"),
    "an org that is no text": lambda: signed(org_id=5),
    "an app with #": lambda: signed(app_id="a#b", sub=f"org-{ORG}-app-a#b"),
    "a subject of another app": lambda: signed(sub=f"org-{ORG}-app-other"),
    "a refresh token": lambda: signed(scope="refresh"),
    "no scope": lambda: signed(scope=None),
}


@pytest.mark.parametrize("make", BAD.values(), ids=BAD.keys())
def test_a_bad_token_is_refused_without_saying_why(tokens: Tokens, make: Callable[[], str]) -> None:
    token = make()
    with pytest.raises(AccessDenied, match=r"^the token is not good: ask for a new one$"):
        tokens.verify(token)


def test_an_expired_token_of_another_key_is_not_called_expired(tokens: Tokens) -> None:
    with pytest.raises(AccessDenied):
        tokens.verify(signed(b"another secret that is long enough", exp=NOW - 1))


def test_keys_rotate_the_first_signs_and_all_verify(time: Time) -> None:
    old, new = hs256("old"), hs256("new", b"a new secret, long enough for HS256 too")
    before = Tokens([old], "price-keeper", time).mint(ORG, "web").token
    during = Tokens([new, old], "price-keeper", time)
    assert during.verify(before).app == "web"
    assert jwt.get_unverified_header(during.mint(ORG, "web").token)["kid"] == "new"
    with pytest.raises(AccessDenied):
        Tokens([new], "price-keeper", time).verify(before)


def test_what_is_remembered_is_bounded(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 10)
    minted = [tokens.mint(ORG, f"app{number}").token for number in range(50)]
    for token in minted:
        tokens.verify(token)
    assert len(tokens._verified) <= 10
    assert [tokens.verify(token).app for token in minted] == [f"app{number}" for number in range(50)]


# Keys of two halves, and where keys come from.


def pems(private: Any) -> tuple[bytes, bytes]:
    secret = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return secret, private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


PRIVATE = {"EdDSA": Ed25519PrivateKey.generate(), "RS256": generate_private_key(65537, 2048)}


@pytest.mark.parametrize("alg", PRIVATE)
def test_a_sidecar_with_the_public_half_verifies_and_cannot_mint(alg: str, tmp_path: Path, time: Time) -> None:
    private, public = pems(PRIVATE[alg])
    (tmp_path / "public.pem").write_bytes(public)
    mint = Tokens(load_keys([Key("k", alg, private_key_env="PEM")], {"PEM": private.decode()}), "i", time)  # type: ignore[arg-type]
    verify = Tokens(load_keys([Key("k", alg, public_key_file=str(tmp_path / "public.pem"))], {}), "i", time)  # type: ignore[arg-type]
    assert verify.verify(mint.mint(ORG, "web").token).app == "web"
    with pytest.raises(AccessDenied):
        verify.mint(ORG, "web")


def test_a_public_key_is_never_taken_for_a_secret(time: Time) -> None:
    """The old trick: a token signed by HS256 with the public key, which everybody has."""
    _, public = pems(PRIVATE["RS256"])
    tokens = Tokens([SigningKey("k", "RS256", PRIVATE["RS256"].public_key(), None)], "price-keeper", time)
    head = base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "kid": "k"}).encode()).rstrip(b"=")
    body = base64.urlsafe_b64encode(json.dumps(claims()).encode()).rstrip(b"=")
    mac = base64.urlsafe_b64encode(hmac.digest(public, head + b"." + body, hashlib.sha256)).rstrip(b"=")
    with pytest.raises(AccessDenied):
        tokens.verify(b".".join((head, body, mac)).decode())


def test_keys_that_cannot_be_had_are_all_named_and_never_shown(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "rsa").write_bytes(pems(PRIVATE["RS256"])[0])
    (tmp_path / "small").write_bytes(pems(generate_private_key(65537, 1024))[0])
    with pytest.raises(ConfigError) as caught:
        load_keys(
            [
                Key("unset", "HS256", secret_env="NOT_SET"),
                Key("short", "HS256", secret_env="SHORT"),
                Key("gone", "HS256", secret_file=str(tmp_path / "nowhere")),
                Key("empty", "EdDSA", private_key_file=str(tmp_path / "empty")),
                Key("mixed", "EdDSA", private_key_file=str(tmp_path / "rsa")),
                Key("small", "RS256", private_key_file=str(tmp_path / "small")),
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
def test_a_bomb_is_a_bad_token(tokens: Tokens, header: bytes) -> None:
    with pytest.raises(AccessDenied):
        tokens.verify(spelled(header))


@pytest.mark.parametrize("junk", ["!", "!" * 50_000, "\n", " ", "=", "\u00e9", "."])
def test_a_token_has_one_spelling(tokens: Tokens, junk: str) -> None:
    """Decoders pass over some characters; each such spelling would be remembered as a token of its own."""
    token = tokens.mint(ORG, "web").token
    tokens.verify(token)
    head, payload, signature = token.split(".")
    for changed in (token + junk, f"{head}{junk}.{payload}.{signature}", f"{head}.{payload}{junk}.{signature}"):
        with pytest.raises(AccessDenied):
            tokens.verify(changed)
    assert list(tokens._verified) == [token]
