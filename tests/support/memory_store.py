"""A store in memory, as fast as property tests and simulations need it. It keeps what `stores/contract` promises, but
that it remembers the tokens of transactions for ever, and nothing of it is deleted when it expires."""

from __future__ import annotations

from collections.abc import Sequence

from price_keeper.errors import CancellationReason, ConditionFailed, ReasonCode, TransactionFailed
from price_keeper.stores.contract import (
    Between,
    ConditionCheck,
    Delete,
    Item,
    Key,
    Page,
    Prefix,
    Put,
    Query,
    StoredRow,
    Update,
    Write,
)
from price_keeper.stores.item_values import (
    apply_update,
    check_query,
    check_transaction,
    check_write,
    evaluate_condition,
)


class MemoryStore:
    def __init__(self) -> None:
        self.items: dict[Key, Item] = {}
        self._done: set[str] = set()
        self._partitions: dict[tuple[str, str], dict[Key, None]] = {}

    async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
        return self.items.get(key)

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = False) -> list[Item | None]:
        return [self.items.get(key) for key in keys]

    async def query(self, query: Query) -> Page:
        check_query(query)
        partition = self._partitions.get((query.table, query.pk), {})
        keys = [key for key in partition if _is_asked_for(query, key.sk)]
        keys.sort(key=lambda key: key.sk.encode(), reverse=query.descending)
        rows = tuple(StoredRow(key, self.items[key]) for key in keys[: query.limit])
        return Page(rows, rows[-1].key.sk if len(rows) < len(keys) else None)

    async def put(self, put: Put) -> None:
        self._written(put)

    async def update(self, update: Update) -> Item:
        self._written(update)
        return self.items[update.key]

    async def exchange(self, update: Update) -> Item | None:
        before = self.items.get(update.key)
        self._written(update)
        return before

    async def delete(self, delete: Delete) -> Item | None:
        before = self.items.get(delete.key)
        self._written(delete)
        return before

    async def transact(self, writes: Sequence[Write], *, token: str | None = None) -> None:
        check_transaction(writes, token)
        if token in self._done:
            return
        reasons = [self._reason(write) for write in writes]
        if any(reason.code is not ReasonCode.NONE for reason in reasons):
            raise TransactionFailed(reasons)
        before = {write.key: self.items.get(write.key) for write in writes}
        try:
            for write in writes:
                self._apply(write)
        except BaseException:  # all or nothing
            for key, item in before.items():
                self._keep(key, item)
            raise
        if token is not None:
            self._done.add(token)

    def _written(self, write: Put | Update | Delete) -> None:
        check_write(write)
        before = self.items.get(write.key)
        if not evaluate_condition(write.condition, before):
            raise ConditionFailed(before)
        self._apply(write)

    def _apply(self, write: Write) -> None:
        match write:
            case Put(key, item):
                self._keep(key, dict(item))
            case Update(key):
                self._keep(key, apply_update(write, self.items.get(key)))
            case Delete(key):
                self._keep(key, None)
            case ConditionCheck():
                pass

    def _keep(self, key: Key, item: Item | None) -> None:
        partition = self._partitions.setdefault(key[:2], {})
        if item is None:
            self.items.pop(key, None)
            partition.pop(key, None)
        else:
            self.items[key] = item
            partition[key] = None

    def _reason(self, write: Write) -> CancellationReason:
        item = self.items.get(write.key)
        is_good = evaluate_condition(write.condition, item)
        return CancellationReason(ReasonCode.NONE) if is_good else CancellationReason(ReasonCode.CONDITION_FAILED, item)


def _is_asked_for(query: Query, sk: str) -> bool:
    text = sk.encode()
    if query.after is not None:
        after = query.after.encode()
        if text >= after if query.descending else text <= after:
            return False
    match query.sort:
        case Prefix(prefix):
            return text.startswith(prefix.encode())
        case Between(low, high):
            return (low is None or low.encode() <= text) and (high is None or text <= high.encode())
    return True
