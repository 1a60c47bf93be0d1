"""What `make clients` installs is what the locks say, from whichever package index a machine has."""

from __future__ import annotations

import json
import re

from tests.support.clients import PROGRAMS


def test_javascript_lock_has_hashes_and_no_index() -> None:
    lock = (PROGRAMS / "package-lock.json").read_text()
    installed = [each for place, each in json.loads(lock)["packages"].items() if place]
    assert len(installed) > 100
    assert all(each["integrity"].startswith("sha512-") for each in installed)
    assert '"resolved"' not in lock
    # Beside who may be paid for a package.
    assert "://" not in re.sub(r'"funding": \{[^}]*\}', "", lock)
