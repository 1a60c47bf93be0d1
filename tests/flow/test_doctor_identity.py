"""The doctor, and whether anybody has registered the org that a sidecar's identity spends for."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

import pytest
from price_keeper.config import Config
from price_keeper.config.config_sections import IdentityConfig
from price_keeper.doctor.doctor_checks import Finding, FindingStatus
from price_keeper.stores import schema
from price_keeper.stores.contract import Put

from tests.support.doctor import run_check, run_checks, write_config
from tests.support.engines import PREFIX, Engines

ORG = str(uuid4())
BOUND = {"mode": "identity", "identity": IdentityConfig(ORG, "shop")}
CHECK = "org of the identity"


async def looked(config: Config) -> Finding:
    return await run_check(CHECK, config)


@pytest.mark.parametrize("name", ["sqlite", "ministack"])
async def test_identity_of_unregistered_org_is_warned_about(engines: Engines, tmp_path: Path, name: str) -> None:
    async with engines.open(name, tmp_path) as store:
        places = {
            "sqlite": {"path": str(tmp_path / "store.db")},
            "ministack": {
                "engine": "dynamodb",
                "table_prefix": PREFIX,
                "endpoint": engines.endpoints.get("ministack"),
            },
        }
        config = write_config(tmp_path, store=places[name], auth=BOUND)
        found = await looked(config)
        assert (found.status, ORG in found.message) == (FindingStatus.WARNING, True), found
        assert "its calls are refused (unknown_org: refuse)" in found.message
        assert found.remedy.startswith(f"price-keeper org put {ORG} FILE")
        await store.put(Put(schema.org_config_key(ORG), {"org_name": "Acme"}))
        assert (await looked(config)).status is FindingStatus.OK


async def test_identity_without_store_is_warned_about_and_nothing_created(tmp_path: Path) -> None:
    assert (await looked(write_config(tmp_path, auth=BOUND))).status is FindingStatus.WARNING
    assert os.listdir(tmp_path) == []


async def test_missing_identity_or_control_service_needs_no_org(tmp_path: Path) -> None:
    assert (await looked(write_config(tmp_path))).status is FindingStatus.SKIPPED
    with pytest.raises(AssertionError, match=CHECK):
        await run_checks(write_config(tmp_path, auth=BOUND), only=CHECK, role="control")
