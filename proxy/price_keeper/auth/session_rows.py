"""What the store keeps of a session, and the writes that move it on or end it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from price_keeper.stores import schema
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE, AttributeMissing, Delete, Item, Put, Update, Write, equals

REFRESH_HASH, BEGAN, REFRESHED, ACCESS_UNTIL, VERSION = (
    "refresh_hash",
    "began_us",
    "refreshed_at",
    "access_until",
    "version",
)
GENERATION = "generation"  # the client's, as it was when the secret was checked
ROTATED, EVICTED, REVOKED = "rotated", "evicted", "revoked"  # why a refresh token is refused
REFUSED_AT = "at_epoch"  # since when


@dataclass(frozen=True, slots=True)
class Session:
    sid: str
    began: float
    refreshed: int
    expires: int


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session's row, with all that ending it takes."""

    client: str
    sid: str
    item: Item

    @property
    def age(self) -> tuple[int, str]:
        return int(self.read_int(BEGAN)), self.sid

    @property
    def generation(self) -> int:
        value = self.item.get(GENERATION, 0)
        return value if isinstance(value, int) else 0

    def read_int(self, name: str) -> int:
        value = self.item[name]
        assert isinstance(value, int)
        return value

    def build_end_writes(self, why: str, now: float) -> list[Write]:
        """On condition that it is there, and with the same refresh token: else another one would stay good."""
        refresh_hash = str(self.item[REFRESH_HASH])
        return [
            Delete(schema.session_key(self.client, self.sid), equals(REFRESH_HASH, refresh_hash)),
            build_refusal(refresh_hash, self.read_int(EXPIRY_ATTRIBUTE), why, now, self.client, self.sid),
        ]


def build_version_bump(client: str, head: Item | None) -> Update:
    version = (head or {}).get(VERSION)
    stands = equals(VERSION, version) if isinstance(version, int) else AttributeMissing(VERSION)
    return Update(schema.session_head_key(client), add={VERSION: 1}, condition=stands)


def build_refusal(token_hash: str, until: int, why: str, now: float, client: str, sid: str) -> Put:
    """For as long as the token itself would be good."""
    item: Item = {EXPIRY_ATTRIBUTE: until, "why": why, REFUSED_AT: int(now), "client_id": client, "sid": sid}
    return Put(schema.refused_refresh_token_key(token_hash), item)


def was_rotated_within(seconds: float, refusal: Item, now: float) -> bool:
    """By either's clock, which may differ."""
    refused_at = refusal.get(REFUSED_AT)
    return isinstance(refused_at, int) and abs(now - refused_at) < seconds
