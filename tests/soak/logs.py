"""What the sidecars wrote on the way: no traceback, nothing secret, and not too much of anything."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from tests.soak.fleet import ADMIN_KEY, SECRET, Member
from tests.soak.load import MARKER
from tests.soak.verdict import Verdict

MOST_BYTES_A_SECOND = 2000.0  # of all of them together, under faults all along
_TRACES = re.compile(r"background task .*|Traceback|Task was destroyed|never retrieved")
_JWT = r"eyJ[\w-]{10,}\.[\w-]{10,}\."
_STARTING = 50_000
_DIGITS = re.compile(r"[\d.]+|[0-9a-f]{8}-[0-9a-f-]{27}")


def check_logs(
    members: Iterable[Member], credentials: str, bearers: Iterable[bytes], seconds: float, verdict: Verdict
) -> None:
    texts = [path.read_text(errors="replace") for member in members for path in member.logs]
    whole = "\n".join(texts)
    verdict.none("tracebacks in a log", _TRACES.findall(whole))
    secrets = [SECRET, ADMIN_KEY, credentials.partition(":")[2], *(each.decode() for each in bearers)]
    verdict.none("secrets in a log", sum(secret in whole for secret in secrets) + len(re.findall(_JWT, whole)))
    verdict.none("words of a prompt in a log", whole.count(MARKER))
    most = _STARTING + MOST_BYTES_A_SECOND * seconds
    verdict.holds("bytes of all logs", f"at most {most:.0f}", len(whole), is_so=len(whole) <= most)
    verdict.figures["lines in logs"] = whole.count("\n")
    kinds = Counter(_DIGITS.sub("…", line.partition(" ")[2])[:110] for line in whole.splitlines() if line)
    verdict.log_findings = [f"{count} {line}" for line, count in kinds.most_common(40)]
