"""AWS credentials for DynamoDB, renewed without blocking calls.

aiobotocore would block the call that finds the credentials due for renewal, and every call in the ten minutes before
they expire; and it does not check the host name of the service that issues them (see `aws_session`). Here the last
credentials stay in use until DynamoDB rejects them or newer ones arrive.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiobotocore.credentials import AioCredentials
from aiobotocore.session import AioSession, get_session
from botocore.exceptions import BotoCoreError, CredentialRetrievalError, NoCredentialsError

from price_keeper.provider_chain import ANSWER_TIMEOUT_SECONDS, RENEW_INTERVAL_SECONDS, FindCredentials, ProviderChain

RETRY_SECONDS = 5.0  # after a renewal that failed, timed out or brought credentials that DynamoDB rejects
# Of the retry delay while DynamoDB keeps rejecting credentials: a renewal may call a service that a whole fleet uses.
MAX_DOUBLINGS = 4
# How long the one call that starts a renewal waits for it; all other calls use the current credentials.
RENEWAL_WAIT_SECONDS = 1.0

_log = logging.getLogger("price_keeper.stores")


class StoreCredentials(AioCredentials):  # type: ignore[misc]
    """Credentials as aiobotocore expects them. The last ones stay in use until DynamoDB rejects them."""

    def __init__(
        self, make: Callable[[], FindCredentials] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__("", "", method="background renewal")
        self._chain = ProviderChain(make, now)
        self._now = now
        self._current: Any = None
        self._due_at = self._last_renewal_at = now()
        self._is_refused = False
        self._futile_renewals = 0  # renewals in a row whose credentials were rejected as well
        self._logged_failure = ""

    def on_refused(self) -> None:
        """DynamoDB rejected the credentials: renew them soon, from a new provider chain.

        A botocore chain reads its source only once, so the old chain would return the same credentials.
        """
        if not self._is_refused:
            self._is_refused = True
            retry_at = (
                self._last_renewal_at + RETRY_SECONDS * 2**self._futile_renewals
                if self._futile_renewals
                else self._now()
            )
            self._due_at = min(self._due_at, retry_at)

    async def get_frozen_credentials(self) -> Any:
        """The current credentials; the call that finds them due renews them. Raises BotoCoreError if there are none."""
        if self._current is None or self._now() >= self._due_at:
            self._start_renewal()
            try:
                self._accept(
                    await self._chain.load(ANSWER_TIMEOUT_SECONDS if self._current is None else RENEWAL_WAIT_SECONDS)
                )
            except Exception as failure:  # a provider may raise any exception of its source
                self._keep_current(failure)
        return self._current

    def _start_renewal(self) -> None:
        self._last_renewal_at = self._now()
        self._due_at = self._last_renewal_at + RETRY_SECONDS
        if self._is_refused:
            self._chain.replace()
        self._futile_renewals = min(self._futile_renewals + 1, MAX_DOUBLINGS) if self._is_refused else 0
        self._is_refused = False  # until DynamoDB rejects the next ones

    def _accept(self, credentials: Any) -> None:
        if credentials is None:
            raise NoCredentialsError
        self._current = credentials
        if self._logged_failure:
            self._logged_failure = ""
            _log.warning("AWS credentials of the store are renewed again")
        self.account_id = credentials.account_id  # DynamoDB has endpoints for each account
        self._due_at = self._now() + RENEW_INTERVAL_SECONDS

    def _keep_current(self, failure: Exception) -> None:
        """After a failed renewal, keep the current credentials. Raises BotoCoreError if there are none."""
        kind = type(failure).__name__  # the message itself may hold a secret
        if self._current is None:
            if isinstance(failure, BotoCoreError):
                raise failure
            raise CredentialRetrievalError(provider=self.method, error_msg=kind) from None
        if kind != self._logged_failure:
            self._logged_failure = kind
            message = "AWS credentials of the store could not be renewed, and the last ones hold"
            _log.warning("%s: %s; repair their source before they expire (price-keeper doctor names it)", message, kind)


async def create_session(credentials: StoreCredentials) -> AioSession:
    """A session with these credentials. They are loaded once here, so that the first calls need not wait for them."""
    created = get_session()
    created._credentials = credentials  # botocore has no public way to set a credentials object
    with suppress(BotoCoreError):  # the first call raises it again
        await credentials.get_frozen_credentials()
    return created
