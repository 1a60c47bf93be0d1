"""The input of all checks: configuration, environment, clock and role, and objects that several checks share.

The DynamoDB client and the AWS credentials are loaded once, on first use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from price_keeper.app import Role, open_dynamodb
from price_keeper.clock import Clock
from price_keeper.config import Config
from price_keeper.data_port_wiring import SIMULATED
from price_keeper.single_flight import SingleFlight

if TYPE_CHECKING:
    from price_keeper.stores.dynamodb import DynamoStore
from datetime import datetime
from typing import NamedTuple

from price_keeper.upstream.sigv4 import AwsCredentials

T = TypeVar("T")


class OnceLoaded(Generic[T]):
    """Loads a value on first use, single-flight: concurrent callers share one load. A failed load is not cached."""

    def __init__(self, load: Callable[[], Awaitable[T]]) -> None:
        self._load = load
        self._single_flight = SingleFlight[None, T]()
        self.loaded: list[T] = []

    async def get(self) -> T:
        return self.loaded[0] if self.loaded else await self._single_flight.get_or_load(None, self._load_first)

    async def _load_first(self) -> T:
        self.loaded.append(await self._load())
        return self.loaded[0]


@dataclass
class DoctorContext:
    """`source` is the option that selects the same configuration for another command, for use in remedies."""

    config: Config
    environ: Mapping[str, str]
    clock: Clock
    source: str = ""
    role: Role = "both"

    @property
    def has_data_port(self) -> bool:
        return self.role != "control"

    @property
    def is_simulated(self) -> bool:
        return self.config.upstream.endpoint == SIMULATED

    @property
    def is_on_dynamodb(self) -> bool:
        return self.config.store.engine == "dynamodb"

    @property
    def follows_prices(self) -> bool:
        return not self.is_simulated and any(label.price_source == "aws" for label in self.config.labels.values())

    @property
    def signs_calls(self) -> bool:
        """Whether calls to Bedrock are signed with AWS credentials."""
        return not self.is_simulated and self.config.upstream.auth == "sigv4"

    @property
    def needs_aws(self) -> bool:
        return self.is_on_dynamodb or (self.has_data_port and (self.follows_prices or self.signs_calls))

    @cached_property
    def _credentials(self) -> OnceLoaded[FoundCredentials]:
        return OnceLoaded(lambda: asyncio.to_thread(find_credentials))

    @cached_property
    def _store(self) -> OnceLoaded[DynamoStore]:
        return OnceLoaded(lambda: open_dynamodb(self.config.store, self.clock))

    async def credentials(self) -> FoundCredentials:
        return await self._credentials.get()

    async def dynamodb_store(self) -> DynamoStore:
        return await self._store.get()

    async def dynamodb(self) -> Any:
        """The DynamoDB client. botocore creates its class at run time, so there is no static type."""
        return (await self.dynamodb_store()).client

    async def close(self) -> None:
        for store in self._store.loaded:
            await store.close()


class FoundCredentials(NamedTuple):
    """The AWS credentials and their provider; without `keys`, `problem` is the reason why there are none."""

    provider: str = ""
    keys: AwsCredentials | None = None
    expires: datetime | None = None
    problem: str = ""


def find_credentials() -> FoundCredentials:
    """Query the provider chain, which may read files, run programs and call services. Never raises."""
    try:
        return _query_provider_chain()
    except Exception as failure:  # a provider may raise any exception of its source, and quote a secret in it
        return FoundCredentials(problem=f"the providers of AWS credentials failed: {type(failure).__name__}")


def _query_provider_chain() -> FoundCredentials:
    from botocore.session import Session  # takes 75 ms, which a setup without AWS need not pay

    resolved = Session().get_credentials()
    if resolved is None:
        return FoundCredentials(problem="no AWS credentials were found")
    frozen = resolved.get_frozen_credentials()  # renews them first if they are due
    try:
        keys = AwsCredentials(_strip(frozen.access_key), _strip(frozen.secret_key), _strip(frozen.token) or None)
    except ValueError as failure:
        return FoundCredentials(
            resolved.method, problem=f"the AWS credentials of {resolved.method} cannot be used: {failure}"
        )
    expires = getattr(resolved, "_expiry_time", None)  # botocore has no public attribute for it
    return FoundCredentials(resolved.method, keys, expires)


def _strip(text: Any) -> str:
    """Files and variables often end in a newline, which is not part of a secret."""
    return (text or "").strip()
