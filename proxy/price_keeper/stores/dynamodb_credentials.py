"""AWS credentials for DynamoDB and for the AWS Price List, renewed in the background.

aiobotocore would make the call wait that finds credentials due, and every call in the ten minutes before they
expire; and it does not check the host name of the service that hands them out (see `aws_session`). Here the last
credentials stay in use until DynamoDB refuses them or newer ones arrive.
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

RETRY_SECONDS = 5.0  # where none came, none in time, or none that DynamoDB takes
MAX_DOUBLINGS = 4  # of that, while it goes on taking none: each look may ask a service, for a fleet
RENEWAL_WAIT_SECONDS = (
    1.0  # for newer ones, by the one call that asks for them; the others go on with those that are there
)

_log = logging.getLogger("price_keeper.stores")


class StoreCredentials(AioCredentials):  # type: ignore[misc]
    """What aiobotocore takes for credentials. The last ones hold until DynamoDB says otherwise."""

    def __init__(
        self, make: Callable[[], FindCredentials] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__("", "", method="renewed aside")
        self._chain = ProviderChain(make, now)
        self._now = now
        self._current: Any = None
        self._due_at = self._last_renewal_at = now()
        self._is_refused = False
        self._futile_renewals = 0  # looks for others, whose findings were refused as well
        self._logged_failure = ""

    def on_refused(self) -> None:
        """DynamoDB does not take them. What it has found a chain reads only once, so another one is asked."""
        if not self._is_refused:
            self._is_refused = True
            retry_at = (
                self._last_renewal_at + RETRY_SECONDS * 2**self._futile_renewals
                if self._futile_renewals
                else self._now()
            )
            self._due_at = min(self._due_at, retry_at)

    async def get_frozen_credentials(self) -> Any:
        """Raises BotoCoreError where there are none."""
        if self._current is None or self._now() >= self._due_at:
            self._start_renewal()
            try:
                self._accept(
                    await self._chain.load(ANSWER_TIMEOUT_SECONDS if self._current is None else RENEWAL_WAIT_SECONDS)
                )
            except Exception as failure:  # providers raise whatever their sources do
                self._keep_current(failure)
        return self._current

    def _start_renewal(self) -> None:
        self._last_renewal_at = self._now()
        self._due_at = self._last_renewal_at + RETRY_SECONDS
        if self._is_refused:
            self._chain.replace()
        self._futile_renewals = min(self._futile_renewals + 1, MAX_DOUBLINGS) if self._is_refused else 0
        self._is_refused = False  # until DynamoDB says so again

    def _accept(self, credentials: Any) -> None:
        if credentials is None:
            raise NoCredentialsError
        self._current, self._logged_failure = credentials, ""
        self.account_id = credentials.account_id  # by which DynamoDB has endpoints
        self._due_at = self._now() + RENEW_INTERVAL_SECONDS

    def _keep_current(self, failure: Exception) -> None:
        """Raises BotoCoreError where there is nothing to keep."""
        kind = type(failure).__name__  # what it says may hold a secret
        if self._current is None:
            if isinstance(failure, BotoCoreError):
                raise failure
            raise CredentialRetrievalError(provider=self.method, error_msg=kind) from None
        if kind != self._logged_failure:
            self._logged_failure = kind
            message = "AWS credentials of the store or the price list could not be renewed, and the last ones hold"
            _log.warning("%s: %s", message, kind)


async def create_session(credentials: StoreCredentials) -> AioSession:
    """They have been looked for once, so that the first calls need not wait for that."""
    created = get_session()
    created._credentials = credentials  # there is no other way to bring one's own
    with suppress(BotoCoreError):  # who calls is told
        await credentials.get_frozen_credentials()
    return created
