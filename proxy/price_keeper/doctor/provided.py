"""The AWS credentials that botocore's chain of providers has for this process."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from price_keeper.forwarding.sigv4 import Credentials


class Provided(NamedTuple):
    """Without `keys` there are none, for the reason that `trouble` gives."""

    provider: str = ""
    keys: Credentials | None = None
    expires: datetime | None = None
    trouble: str = ""


def provided() -> Provided:
    """May read files, run programs and call services. Never raises."""
    try:
        return _asked()
    except Exception as failure:  # providers raise whatever their sources do, and may quote a secret
        return Provided(trouble=f"the providers of AWS credentials failed: {type(failure).__name__}")


def _asked() -> Provided:
    from botocore.session import Session  # 75 ms that those without AWS need not pay

    found = Session().get_credentials()
    if found is None:
        return Provided(trouble="no AWS credentials were found")
    frozen = found.get_frozen_credentials()  # renews them first, if it is time
    try:
        keys = Credentials(_bare(frozen.access_key), _bare(frozen.secret_key), _bare(frozen.token) or None)
    except ValueError as failure:
        return Provided(found.method, trouble=f"the AWS credentials of {found.method} cannot be used: {failure}")
    expires = getattr(found, "_expiry_time", None)  # botocore has no other way to tell
    return Provided(found.method, keys, expires)


def _bare(text: Any) -> str:
    """Files and variables often end in a new line, which is no part of a secret."""
    return (text or "").strip()
