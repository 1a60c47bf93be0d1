"""One write for each call, and another where it used something else than was estimated: exact, and slow."""

from __future__ import annotations

import asyncio

from price_keeper.limits.admission import EXACT, REFUSED, Admission, Amounts, Buckets, in_order
from price_keeper.limits.lease import Costs, select_slowest_refill
from price_keeper.limits.limiter import Grant, BucketClient
from price_keeper.tasks import Tasks

WAIT_SECONDS = 2.0  # of a call, for the store


class Exactly:
    def __init__(self, limiter: BucketClient, tasks: Tasks) -> None:
        self._limiter = limiter
        self._tasks = tasks

    async def admit(self, buckets: Buckets, costs: Amounts) -> Admission:
        """Raises StoreError or TimeoutError."""
        answer: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._tasks.spawn(self._acquire(buckets, costs, answer))
        async with asyncio.timeout(WAIT_SECONDS):
            grant = await answer
        names = tuple(select_slowest_refill(buckets))
        how = REFUSED if grant.is_refused else EXACT
        return Admission(how, buckets, names, in_order(names, costs), None, grant.wait_ms)

    async def _acquire(self, buckets: Buckets, costs: Amounts, answer: asyncio.Future[Grant]) -> None:
        """Not cancelled with who waits for it, since then nobody would know what was written."""
        try:
            grant = await self._limiter.acquire(buckets, costs)
        except Exception as failure:  # of whatever kind: somebody waits for the answer
            if not answer.done():
                answer.set_exception(failure)
            return
        if not answer.done():
            answer.set_result(grant)
        elif not grant.is_refused:
            back = {name: -amount for name, amount in costs.items()}
            await self._limiter.adjust(buckets, back, back)

    def settle(self, admission: Admission, real: Costs) -> None:
        """The estimate was told as used."""
        each = zip(admission.names, admission.costs, real, strict=True)
        more = {name: used - cost for name, cost, used in each if used != cost}
        if more:
            self._tasks.spawn(self._limiter.adjust(admission.buckets, more, more))
