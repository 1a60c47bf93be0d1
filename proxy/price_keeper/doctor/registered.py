"""The org that a sidecar's identity spends for: that somebody has registered it, or its calls are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

from price_keeper.doctor.doctor_checks import Finding, ok, skipped, warning
from price_keeper.doctor.doctor_context import DoctorContext
from price_keeper.errors import StoreError
from price_keeper.stores import schema
from price_keeper.stores.sqlite_file import has_item


async def check_identity_org(context: DoctorContext) -> Finding:
    identity = context.config.auth.identity
    if identity is None:
        return skipped("every call brings a token, which names its org")
    try:
        is_there = await _is_registered(context, identity.org)
    except StoreError as failure:
        return skipped(f"the store cannot be asked: {failure}")
    if is_there:
        return ok(f"{identity.org} is registered")
    is_refused = context.config.unknown_org == "refuse"
    effect = "its calls are refused" if is_refused else "its calls are served without a budget"
    return warning(
        f"nobody has registered {identity.org}, so {effect} (unknown_org: {context.config.unknown_org})",
        f"price-keeper org put {identity.org} FILE, or correct auth.identity.org",
    )


async def _is_registered(context: DoctorContext, org: str) -> bool:
    key = schema.org_config_key(org)
    if context.is_on_dynamodb:
        store = await context.dynamodb_store()
        return await store.get(key, consistent=True) is not None
    return await asyncio.to_thread(has_item, Path(context.config.store.path), key)
