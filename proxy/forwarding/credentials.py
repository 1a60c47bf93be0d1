"""AWS credentials for signing: from botocore's chain of providers, renewed in the background, never on a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from proxy.errors import ConfigError, UpstreamAway
from proxy.forwarding.sigv4 import Credentials

RENEW_SECONDS = 60.0  # botocore itself renews a quarter of an hour before expiry, when asked

_log = logging.getLogger("proxy.forwarding")


class CredentialSource(Protocol):
    def current(self) -> Credentials:
        """Raises UpstreamAway when there are none."""


class FixedCredentials:
    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def current(self) -> Credentials:
        return self._credentials


class ProvidedCredentials:
    """`find` asks botocore's chain, which may read files and call services; it runs in a thread of its own."""

    def __init__(self, find: Callable[[], Any] | None = None) -> None:
        self._find = find or _botocore_chain()
        self._current: Credentials | None = None
        self._is_first = True

    def current(self) -> Credentials:
        if self._current is None:
            raise UpstreamAway("the sidecar has no AWS credentials to call Bedrock with", retry_after=5)
        return self._current

    async def renew(self) -> None:
        """Keeps the last ones when there are no newer: it is for Bedrock to say that they have expired.

        Raises ConfigError the first time alone, for what cannot be used: then somebody is there to mend it.
        """
        is_first, self._is_first = self._is_first, False
        try:
            found = await asyncio.to_thread(self._find)
        except Exception as failure:  # providers raise whatever their sources do
            _log.warning("AWS credentials could not be renewed: %s", type(failure).__name__)
            return
        if found is None:
            _log.warning("no AWS credentials were found")
            return
        try:
            renewed = _stripped(found)
        except ValueError as failure:
            if is_first:
                raise ConfigError([f"the AWS credentials cannot be used: {failure}"]) from None
            _log.warning("new AWS credentials cannot be used: %s", failure)
            return
        if renewed != self._current:  # the signer keeps its key as long as it is given the same object
            self._current = renewed


def _stripped(found: Any) -> Credentials:
    """Files and variables often end in a new line, which is no part of a secret; an empty token is none."""
    token = (found.token or "").strip() or None
    return Credentials((found.access_key or "").strip(), (found.secret_key or "").strip(), token)


def _botocore_chain() -> Callable[[], Any]:
    from botocore.session import Session  # 75 ms that those without AWS need not pay

    session = Session()

    def find() -> Any:
        provided = session.get_credentials()
        return provided.get_frozen_credentials() if provided is not None else None

    return find
