"""Tokens: signed by us and saying who calls, or refused; a token that was changed is none."""

from __future__ import annotations

import hashlib
import hmac
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any

from price_keeper.auth.container_credentials import parse_authorization
from price_keeper.auth.signing_keys import SigningKey
from price_keeper.auth.tokens import SKEW_SECONDS, TokenService
from price_keeper.errors import AccessDenied, TokenExpired

from tests.fuzz.documents import document
from tests.fuzz.oracle import holds, same
from tests.fuzz.reader import Reader

ORG = "550e8400-e29b-41d4-a716-446655440000"
SECRET = b"a secret that is long enough for HS256, and that the one who guesses is not told"
NOW = 1_800_000_000
KEY = SigningKey("k1", "HS256", SECRET, SECRET)
HEADS = ({"alg": "HS256", "kid": "k1"}, {"alg": "none", "kid": "k1"}, {"alg": "HS512", "kid": "k1"}, {"alg": "HS256"},
         {"alg": "HS256", "kid": "k2"}, {"alg": "HS256", "kid": ["k1"]},
         {"alg": "HS256", "kid": "k1", "crit": ["b64"], "b64": False},
         {"alg": "HS256", "kid": "k1", "zip": "DEF"})  # fmt: skip
GOOD: dict[str, Any] = {"iss": "price-keeper", "aud": "price-keeper", "sub": f"org-{ORG}-app-web", "iat": NOW,
                        "exp": NOW + 3600, "jti": "j", "org_id": ORG, "app_id": "web", "scope": "access"}  # fmt: skip
NAMES = (*GOOD, "sid", "gen", "nbf", "app_id", "")
TEXTS = (*(value for value in GOOD.values() if isinstance(value, str)), "refresh", f"org-{ORG}", "a#b", "x" * 65, "")
WORDS = (b'"alg":"none"', b'"scope":"refresh"', b'"aud":["price-keeper"]', b"eyJhbGciOiJIUzI1NiIsImtpZCI6ImsxIn0.")


def _part(raw: bytes) -> str:
    return urlsafe_b64encode(raw).rstrip(b"=").decode()


def _signed(head: bytes, claims: bytes, digest: Any = hashlib.sha256) -> str:
    text = f"{_part(head)}.{_part(claims)}"
    return f"{text}.{_part(hmac.digest(SECRET, text.encode(), digest))}"


def one(data: bytes) -> None:
    reader = Reader(data)
    how = reader.byte() % 4
    if how == 0:
        text = reader.rest().decode("latin-1")
        same(_read(text), [], "read of no token")
        _pair(text)
    elif how == 1:
        _changed(reader)
    else:
        _made(reader, is_nearly_good=how == 2)


def _read(token: str) -> list[Any]:
    """What the readers of each kind make of it; those that refuse it with the right words make nothing."""
    found = []
    tokens = TokenService([KEY], "price-keeper", lambda: NOW)
    for read in (tokens.verify_access, tokens.verify_access, tokens.verify_refresh, tokens.verify_any):
        try:
            found.append(read(token))
        except (AccessDenied, TokenExpired) as refusal:
            holds(token not in refusal.message or len(token) < 3, "a token in a message")
    return found


def _changed(reader: Reader) -> None:
    good = _signed(json.dumps(HEADS[0]).encode(), json.dumps(GOOD).encode())
    same(len(_read(good)), 3, "readers of a good token")
    at, put = reader.number(2) % len(good), reader.some().decode("latin-1")
    token = good[:at] + put + good[at + reader.byte() % 4 :]
    if token != good and _read(token):
        same(token.rpartition(".")[0], good.rpartition(".")[0], "what is signed")
        same(*(urlsafe_b64decode(each.rpartition(".")[2] + "=") for each in (token, good)), "the signature")


def _made(reader: Reader, *, is_nearly_good: bool) -> None:
    """Signed well, whatever it says: as by a key of ours in hands that are none of ours."""
    head = reader.pick(HEADS)
    digest = hashlib.sha512 if reader.byte() % 8 == 7 else hashlib.sha256
    claims = document(reader, NAMES, TEXTS)
    if is_nearly_good:
        members = claims.strip()[1:-1]
        claims = json.dumps(GOOD).encode()[:-1] + (b"," + members if members.strip() else b"") + b"}"
    found = _read(_signed(json.dumps(head).encode(), claims, digest))
    if not found:
        return
    same((head.get("alg"), head.get("kid"), digest), ("HS256", "k1", hashlib.sha256), "the key")
    said = json.loads(claims)
    for each in found:
        aud = said["aud"]
        holds("price-keeper" in ([aud] if isinstance(aud, str) else aud), "not for us")
        same(said["iss"], "price-keeper", "who says it")
        holds(type(said["exp"]) is int and said["exp"] > NOW and said["iat"] <= NOW + SKEW_SECONDS, "its time")
        same(
            (each.caller.org, each.caller.app, each.caller.client_id),
            (said["org_id"], said.get("app_id"), said["sub"]),
            "who",
        )
        app = f"-app-{each.caller.app}" if each.caller.app is not None else ""
        same(each.caller.client_id, f"org-{said['org_id']}{app}", "the client")
        same((each.purpose, each.jti, each.sid), (said["scope"], said["jti"], said.get("sid")), "the claims")


def _pair(text: str) -> None:
    try:
        client, secret = parse_authorization(text)
    except AccessDenied:
        holds(":" not in text, "a pair that is refused")
        return
    same(f"{client}:{secret}", text, "a client and its secret")
