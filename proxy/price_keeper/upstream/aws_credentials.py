"""AWS credentials for signing: loaded from botocore's provider chain and renewed in the background, never on a request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from price_keeper.errors import ConfigError, UpstreamUnavailable
from price_keeper.provider_chain import FindCredentials, ProviderChain, ProviderTimeout
from price_keeper.upstream.sigv4 import AwsCredentials

UNUSABLE_CHECK_SECONDS = 2.0  # between two looks while there are none, or when Bedrock refuses them
MAX_SKIPPED_CHECKS = (
    15  # looks left out while what they find goes on being refused: each may ask a service, for a fleet
)

_NOT_RENEWED = "the sidecar's AWS credentials could not be renewed, and the last ones hold; the log says why"

_log = logging.getLogger("price_keeper.forwarding")


class CredentialSource(Protocol):
    @property
    def problem(self) -> str | None:
        """What is not as it should be, though there are some."""

    def current(self) -> AwsCredentials:
        """Raises UpstreamAway when there are none."""

    def on_refused(self) -> None:
        """Bedrock does not take them."""


class StaticCredentials:
    problem = None

    def __init__(self, credentials: AwsCredentials) -> None:
        self._credentials = credentials

    def current(self) -> AwsCredentials:
        return self._credentials

    def on_refused(self) -> None:
        pass


class RefreshingCredentials:
    """`chain` makes botocore's, unless another is wanted."""

    def __init__(self, chain: Callable[[], FindCredentials] | None = None) -> None:
        self._chain = ProviderChain(chain)
        self._current: AwsCredentials | None = None
        self._is_first = True
        self._is_refused = False
        self._skips = self._skips_left = 0
        self._last_problem = ""
        self.on_renewed: Callable[[], None] = _ignore_renewal

    @property
    def problem(self) -> str | None:
        return _NOT_RENEWED if self._last_problem else None

    def current(self) -> AwsCredentials:
        if self._current is None:
            raise UpstreamUnavailable("the sidecar has no AWS credentials to call Bedrock with", retry_after=5)
        return self._current

    def on_refused(self) -> None:
        self._is_refused = True

    async def renew_unusable(self) -> None:
        """Those that are refused, or not there, sooner than others. Of those that it has found a chain reads a file
        only once, so another one is made: somebody may have put good ones there. The longer it is of no use, the more
        seldom: it may be a region that takes none of this account's."""
        if self._skips_left:
            self._skips_left -= 1
            return
        if self._is_refused:
            self._is_refused = False  # until Bedrock says so again
            self._skips = self._skips_left = min(2 * self._skips + 1, MAX_SKIPPED_CHECKS)
            self._chain.replace()
        elif self._current is not None:
            self._skips = 0
            return
        await self.renew()

    async def renew(self) -> None:
        """Keeps the last ones when there are no newer: it is for Bedrock to say that they have expired.

        Raises ConfigError the first time alone, for what cannot be used: then somebody is there to mend it.
        """
        is_first, self._is_first = self._is_first, False
        try:
            found = await self._chain.load()
        except ProviderTimeout as silence:
            self._log_once(f"AWS credentials could not be renewed: {silence}")
            return
        except Exception as failure:  # providers raise whatever their sources do
            # What it says may hold a secret. Botocore itself raises this kind for one reason alone.
            why = "what came is expired" if type(failure) is RuntimeError else type(failure).__name__
            self._log_once(f"AWS credentials could not be renewed: {why}")
            return
        if found is None:
            self._log_once("no AWS credentials were found")
            return
        try:
            renewed = _parse_credentials(found)
        except ValueError as failure:
            if is_first:
                raise ConfigError([f"the AWS credentials cannot be used: {failure}"]) from None
            self._log_once(f"new AWS credentials cannot be used: {failure}")
            return
        self._last_problem = ""
        if renewed != self._current:  # the signer keeps its key as long as it is given the same object
            self._current = renewed
            self.on_renewed()

    def _log_once(self, problem: str) -> None:
        """Once, however often they are looked for."""
        if problem != self._last_problem:
            self._last_problem = problem
            _log.warning("%s", problem)


def _parse_credentials(found: Any) -> AwsCredentials:
    """Files and variables often end in a new line, which is no part of a secret; an empty token is none."""
    token = (found.token or "").strip() or None
    return AwsCredentials((found.access_key or "").strip(), (found.secret_key or "").strip(), token)


def _ignore_renewal() -> None:
    """Nobody wants to hear of it."""
