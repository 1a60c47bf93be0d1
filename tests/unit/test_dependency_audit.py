"""The audit of what is pinned, before an index of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tools.audit import audit, from_index, pins

LOCK = "bad==1.0 \\\n    --hash=sha256:00\nfine[extra]==2.0 ; python_version < '4' \\\n    --hash=sha256:00\nold==3.0\n"
INDEX: dict[str, Any] = {
    "/bad/1.0/json": {
        "info": {"version": "1.0", "license_expression": "MIT"},
        "vulnerabilities": [{"id": "A-1"}, {"id": "A-0", "withdrawn": "2026-01-01"}],
    },
    "/fine/json": {"info": {"version": "2.0", "license": "BSD\nand a page of it"}, "vulnerabilities": []},
    "/old/json": {"info": {"version": "3.1"}, "vulnerabilities": [{"id": "of another release"}]},
}


@contextmanager
def index() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = INDEX.get(self.path)
            self.send_response(404 if found is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.mark.parametrize(("lines", "code"), [(LOCK, 1), ("fine==2.0\nold==3.0\n", 2), ("fine==2.0\n", 0)])
def test_audit_reports_vulnerabilities_unknowns_and_licences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, code: int
) -> None:
    lock = tmp_path / "run.lock"
    lock.write_text(lines)
    with index() as url:
        assert audit(pins([lock]), from_index(url)) == code
    output = capsys.readouterr().out
    assert ("bad 1.0 (run): A-1\n" in output) == (code == 1)
    assert ("not told of: old 3.0 (run)" in output) == (code != 0)
    assert "A-0" not in output
    assert "of another release" not in output
    if "fine" in lines:
        assert "fine 2.0: BSD\n" in output
