"""docs/public-contract.yaml is what the running product does; so no public name changes unseen."""

from __future__ import annotations

from difflib import unified_diff

import pytest

from tests.public_contract.whole import FILE, text
from tests.support.compiled import IS_COMPILED


@pytest.mark.skipif(IS_COMPILED, reason="is the same for all builds, but reads the sources")
def test_public_contract_matches_product() -> None:
    written, found = FILE.read_text(), text()
    changed = "".join(unified_diff(written.splitlines(True), found.splitlines(True), "as told", "as found", n=2))
    if changed:
        pytest.fail(f"the public contract changed; if it is meant to: make contract, a line in CHANGELOG.md\n{changed}")
