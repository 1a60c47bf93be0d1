"""AWS credentials for signing: loaded from botocore's provider chain, and renewed in the background.

START HERE: `RefreshingCredentials`. A call never waits for a renewal; it signs with the last credentials.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from price_keeper.errors import ConfigError, UpstreamUnavailable
from price_keeper.provider_chain import FindCredentials, ProviderChain, ProviderTimeout
from price_keeper.upstream.sigv4 import AwsCredentials

UNUSABLE_CHECK_SECONDS = 2.0  # between two checks while there are no credentials, or while Bedrock refuses them
# Checks skipped while Bedrock keeps refusing what they find: each check may ask a service that serves a whole fleet.
MAX_SKIPPED_CHECKS = 15

_NOT_RENEWED = "the sidecar's AWS credentials could not be renewed, and the last ones hold; the log says why"

_log = logging.getLogger("price_keeper.forwarding")


class CredentialSource(Protocol):
    """Where the signer gets its credentials."""

    @property
    def problem(self) -> str | None:
        """A warning about credentials that exist, such as a failed renewal; None if there is none."""

    def current(self) -> AwsCredentials:
        """Return the credentials to sign with. Raises UpstreamUnavailable if there are none."""

    def on_refused(self) -> None:
        """Bedrock refused the credentials."""


class StaticCredentials:
    problem = None

    def __init__(self, credentials: AwsCredentials) -> None:
        self._credentials = credentials

    def current(self) -> AwsCredentials:
        return self._credentials

    def on_refused(self) -> None:
        pass


class RefreshingCredentials:
    """Credentials from a provider chain, renewed in the background. `chain` builds it; botocore's is the default."""

    def __init__(self, chain: Callable[[], FindCredentials] | None = None) -> None:
        self._chain = ProviderChain(chain)
        self._current: AwsCredentials | None = None
        self._is_first = True
        self._is_refused = False
        self._skips = self._skips_left = 0
        self._last_problem = ""
        self._on_renewed: list[Callable[[], None]] = []

    def subscribe(self, on_renewed: Callable[[], None]) -> None:
        """Call `on_renewed` after each renewal that brought other credentials."""
        self._on_renewed.append(on_renewed)

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
        """Look for new credentials if there are none or Bedrock refuses them; called more often than `renew`.

        A chain reads the file of the credentials that it found only once. So refused credentials lead to a new chain,
        because an operator may have replaced them. The longer this fails, the rarer it gets: the reason may be a region
        that accepts no credentials of this account.
        """
        if self._skips_left:
            self._skips_left -= 1
            return
        if self._is_refused:
            self._is_refused = False  # until Bedrock refuses them again
            self._skips = self._skips_left = min(2 * self._skips + 1, MAX_SKIPPED_CHECKS)
            self._chain.replace()
        elif self._current is not None:
            self._skips = 0
            return
        await self.renew()

    async def renew(self) -> None:
        """Load credentials. The last ones stay in use if there are no newer ones: Bedrock decides whether they expired.

        Raises ConfigError for unusable credentials, but only the first time: at a start an operator can correct them.
        """
        is_first, self._is_first = self._is_first, False
        try:
            found = await self._chain.load()
        except ProviderTimeout as silence:
            self._log_once(f"AWS credentials could not be renewed: {silence}")
            return
        except Exception as failure:  # providers raise whatever their sources do
            # The message may hold a secret. Botocore itself raises RuntimeError for expired credentials only.
            why = "what came is expired" if type(failure) is RuntimeError else type(failure).__name__
            self._log_once(f"AWS credentials could not be renewed: {why}")
            return
        if found is None:
            self._log_once("no AWS credentials were found")
            return
        try:
            renewed = parse_credentials(found)
        except ValueError as failure:
            if is_first:
                raise ConfigError([f"the AWS credentials cannot be used: {failure}"]) from None
            self._log_once(f"new AWS credentials cannot be used: {failure}")
            return
        if self._last_problem:
            self._last_problem = ""
            _log.warning("AWS credentials are renewed again")
        if renewed != self._current:  # an equal object must not replace it: the signer caches its key by identity
            self._current = renewed
            for on_renewed in self._on_renewed:
                on_renewed()

    def _log_once(self, problem: str) -> None:
        """Log a problem when it begins or changes, however often credentials are looked for."""
        if problem != self._last_problem:
            self._last_problem = problem
            _log.warning("%s", problem)


def parse_credentials(found: Any) -> AwsCredentials:
    """Files and variables often end in a newline, which is not part of a secret; an empty token counts as none."""
    token = (found.token or "").strip() or None
    return AwsCredentials((found.access_key or "").strip(), (found.secret_key or "").strip(), token)
