"""The stand-ins for DynamoDB keep what a test wrote, whatever the real date is."""

from __future__ import annotations

import subprocess
import sys

from tests.support import servers


def test_ministack_never_deletes_expired_items() -> None:
    program = f"import sys; {servers._NO_REAPER} import ministack.services.dynamodb, threading;"
    program += " print([each.name for each in threading.enumerate() if 'reaper' in each.name])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
