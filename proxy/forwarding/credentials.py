"""AWS credentials for signing: from botocore's chain of providers, renewed in the background, never on a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from proxy.errors import UpstreamAway
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

    def current(self) -> Credentials:
        if self._current is None:
            raise UpstreamAway("the sidecar has no AWS credentials to call Bedrock with", retry_after=5)
        return self._current

    async def renew(self) -> None:
        """Keeps the last ones when there are no newer: it is for Bedrock to say that they have expired."""
        try:
            found = await asyncio.to_thread(self._find)
        except Exception as failure:  # providers raise whatever their sources do
            _log.warning("AWS credentials could not be renewed: %s", type(failure).__name__)
            return
        if found is None:
            _log.warning("no AWS credentials were found")
            return
        renewed = Credentials(found.access_key, found.secret_key, found.token)
        if renewed != self._current:  # the signer keeps its key as long as it is given the same object
            self._current = renewed


def _botocore_chain() -> Callable[[], Any]:
    from botocore.session import Session  # 75 ms that those without AWS need not pay

    session = Session()

    def find() -> Any:
        provided = session.get_credentials()
        return provided.get_frozen_credentials() if provided is not None else None

    return find
