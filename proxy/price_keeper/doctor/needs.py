"""What each role does with each table of the store, by the names that IAM has for it. Pure.

`tests/flow/test_doctor_needs.py` holds the code to it.
"""

from __future__ import annotations

from collections.abc import Mapping

from price_keeper.app import Role
from price_keeper.stores.schema import TABLES

ACTIONS = ("GetItem", "BatchGetItem", "Query", "PutItem", "UpdateItem", "DeleteItem", "ConditionCheckItem")
_GET, _BATCH, _QUERY, _PUT, _UPDATE, _DELETE, _CHECK = ACTIONS

TablePermissions = Mapping[str, frozenset[str]]  # by table

# Whatever runs records spend, adds it up, knows how scopes stand and which tokens are revoked.
_ALL_ROLES: Mapping[str, tuple[str, ...]] = {
    "config": (_GET, _BATCH, _QUERY),
    "sticky-state": (_BATCH, _UPDATE),
    "usage-agg-sharded": (_BATCH, _UPDATE),
    "daily-total": (_GET, _BATCH, _PUT, _UPDATE),
    "request-dedup": (_QUERY, _PUT, _UPDATE),
    "revoked-tokens": (_BATCH,),
}
_CALL_ROLES: Mapping[str, tuple[str, ...]] = {
    "pricing-cache": (_QUERY, _PUT),
    "rate-buckets": (_GET, _BATCH, _QUERY, _PUT, _UPDATE, _CHECK),
}
_CONTROL_ROLES: Mapping[str, tuple[str, ...]] = {
    "config": (_PUT, _UPDATE, _CHECK),
    "sticky-state": (_GET,),
    "request-dedup": (_GET,),
    "rate-buckets": (_GET, _BATCH, _QUERY, _PUT, _UPDATE, _CHECK),
    "revoked-tokens": (_PUT,),
    "secret-retrieval-tokens": (_GET, _PUT, _UPDATE, _DELETE),
    "sessions": (_GET, _BATCH, _QUERY, _PUT, _UPDATE, _DELETE),
    "audit": (_QUERY, _PUT),
}


def get_table_permissions(role: Role) -> TablePermissions:
    """A table that is not there is none of this role's."""
    parts = [_ALL_ROLES]
    if role != "control":
        parts.append(_CALL_ROLES)
    if role != "sidecar":
        parts.append(_CONTROL_ROLES)
    by_table = {table: frozenset(action for part in parts for action in part.get(table, ())) for table in TABLES}
    return {table: actions for table, actions in by_table.items() if actions}
