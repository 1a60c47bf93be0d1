"""A DNS resolver under a test's control, and the commands that make a process ask only it.

It needs to mount a file over /etc/resolv.conf in a namespace of its own, and port 53 of a loopback address.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

PORT = 53  # /etc/resolv.conf can name no other
_HEAD = struct.Struct("!6H")
_ANSWERED, _NO_SUCH_NAME = 0x8180, 0x8183
_ADDRESS_RECORD = 1


class NameServer:
    """`known` is what it answers with 127.0.0.1; of all else it says that there is no such name. While it is `silent`
    it says nothing at all."""

    def __init__(self, folder: Path) -> None:
        self.known_names: set[str] = set()
        self.is_silent: set[str] = set()
        self.queries: list[str] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        while True:
            address = f"127.{random.randrange(64, 128)}.{random.randrange(256)}.{random.randrange(1, 255)}"
            with suppress(FileExistsError):
                self._socket.bind((address, PORT))
                break
        self._conf = folder / "resolv.conf"
        self._conf.write_text(f"nameserver {address}\noptions timeout:2 attempts:1\n")

    @property
    def wrapper_command(self) -> tuple[str, ...]:
        return ("unshare", "-m", "sh", "-ec", f'mount --bind {self._conf} /etc/resolv.conf; exec "$@"', "sh")

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                question, sender = self._socket.recvfrom(4096)
            except OSError:
                return
            name, end = _parse_name(question)
            self.queries.append(name)
            if name not in self.is_silent:
                with suppress(OSError):
                    self._socket.sendto(_build_answer(question, end, name in self.known_names), sender)


def why_unavailable() -> str:
    """Why there can be none here; empty if there can."""
    if os.geteuid() != 0:
        return "only root may take port 53 and mount over /etc/resolv.conf"
    tried = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True, check=False)
    return f"no mounts of its own here: {tried.stderr.strip()}" if tried.returncode else ""


def _parse_name(question: bytes) -> tuple[str, int]:
    at, parts = _HEAD.size, []
    while length := question[at]:
        parts.append(question[at + 1 : at + 1 + length].decode())
        at += 1 + length
    return ".".join(parts), at + 1 + 4


def _build_answer(question: bytes, end: int, is_known: bool) -> bytes:
    number, *_ = _HEAD.unpack_from(question)
    kind = struct.unpack_from("!H", question, end - 4)[0]
    record = b""
    if is_known and kind == _ADDRESS_RECORD:
        record = struct.pack("!HHHIH4s", 0xC00C, _ADDRESS_RECORD, 1, 0, 4, socket.inet_aton("127.0.0.1"))
    flags = _ANSWERED if is_known else _NO_SUCH_NAME
    return _HEAD.pack(number, flags, 1, bool(record), 0, 0) + question[_HEAD.size : end] + record
