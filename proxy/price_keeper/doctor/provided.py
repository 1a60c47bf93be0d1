"""The AWS credentials that botocore's chain of providers has for this process."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from price_keeper.forwarding.sigv4 import AwsCredentials


class FoundCredentials(NamedTuple):
    """Without `keys` there are none, for the reason that `trouble` gives."""

    provider: str = ""
    keys: AwsCredentials | None = None
    expires: datetime | None = None
    problem: str = ""


def find_credentials() -> FoundCredentials:
    """May read files, run programs and call services. Never raises."""
    try:
        return _query_provider_chain()
    except Exception as failure:  # providers raise whatever their sources do, and may quote a secret
        return FoundCredentials(problem=f"the providers of AWS credentials failed: {type(failure).__name__}")


def _query_provider_chain() -> FoundCredentials:
    from botocore.session import Session  # 75 ms that those without AWS need not pay

    resolved = Session().get_credentials()
    if resolved is None:
        return FoundCredentials(problem="no AWS credentials were found")
    frozen = resolved.get_frozen_credentials()  # renews them first, if it is time
    try:
        keys = AwsCredentials(_strip(frozen.access_key), _strip(frozen.secret_key), _strip(frozen.token) or None)
    except ValueError as failure:
        return FoundCredentials(
            resolved.method, problem=f"the AWS credentials of {resolved.method} cannot be used: {failure}"
        )
    expires = getattr(resolved, "_expiry_time", None)  # botocore has no other way to tell
    return FoundCredentials(resolved.method, keys, expires)


def _strip(text: Any) -> str:
    """Files and variables often end in a new line, which is no part of a secret."""
    return (text or "").strip()
