"""The words of the product as types: who calls, and what a quota applies to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from uuid import UUID

_APP_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def is_org_id(text: str) -> bool:
    """A UUID in its one canonical form, so that no org can be spelled in two ways."""
    try:
        return str(UUID(text)) == text
    except ValueError:
        return False


def is_app_id(text: str) -> bool:
    return _APP_ID.fullmatch(text) is not None


def is_label(text: str) -> bool:
    return _LABEL.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Scope:
    """What a quota applies to: an org, or one of its apps."""

    org: str
    app: str | None = None

    def __post_init__(self) -> None:
        if not is_org_id(self.org):
            raise ValueError(f"an org id is a UUID in lower case, not {self.org!r}")
        if self.app is not None and not is_app_id(self.app):
            raise ValueError(f"an app id is 1 to 64 of letters, digits, '.', '_' and '-', not {self.app!r}")

    @property
    def key(self) -> str:
        return f"ORG#{self.org}" if self.app is None else f"ORG#{self.org}#APP#{self.app}"
