"""One write for each call, and another where it used something else than was estimated: exact, and slow."""

from __future__ import annotations

import asyncio

from price_keeper.limits.admission import EXACT, REFUSED, Amounts, Buckets, RateDecision, order_costs
from price_keeper.rates.bucket_client import BucketClient, Grant
from price_keeper.rates.rate_lease import Costs, select_slowest_refill
from price_keeper.tasks import Tasks

STORE_TIMEOUT_SECONDS = 2.0  # of a call, for the store


class ExactLimiter:
    def __init__(self, bucket_client: BucketClient, tasks: Tasks) -> None:
        self._bucket_client = bucket_client
        self._tasks = tasks

    async def admit(self, buckets: Buckets, costs: Amounts) -> RateDecision:
        """Raises StoreError or TimeoutError."""
        result: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._tasks.spawn(self._acquire(buckets, costs, result))
        async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
            grant = await result
        names = tuple(select_slowest_refill(buckets))
        how = REFUSED if grant.is_refused else EXACT
        return RateDecision(how, buckets, names, order_costs(names, costs), None, grant.wait_ms)

    async def _acquire(self, buckets: Buckets, costs: Amounts, result: asyncio.Future[Grant]) -> None:
        """Not cancelled with who waits for it, since then nobody would know what was written."""
        try:
            grant = await self._bucket_client.acquire(buckets, costs)
        except Exception as failure:  # of whatever kind: somebody waits for the answer
            if not result.done():
                result.set_exception(failure)
            return
        if not result.done():
            result.set_result(grant)
        elif not grant.is_refused:
            refund = {name: -amount for name, amount in costs.items()}
            await self._bucket_client.adjust(buckets, refund, refund)

    def settle(self, admission: RateDecision, actual: Costs) -> None:
        """The estimate was told as used."""
        rows = zip(admission.names, admission.costs, actual, strict=True)
        differences = {name: used - cost for name, cost, used in rows if used != cost}
        if differences:
            self._tasks.spawn(self._bucket_client.adjust(admission.buckets, differences, differences))
