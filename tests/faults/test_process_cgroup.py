"""The memory that the manifests give a sidecar, in a cgroup: it holds the documented load, and is free again after.

Two hundred callers with bodies of 20 MB at once, before a Bedrock that reads none of them until all is full, and beside
them strangers who announce frames of 16 MB. The kernel ends what needs more.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.cgroups import Cgroup, cgroup, why_unavailable
from tests.support.sidecar_crashes import SidecarSetup
from tests.support.sidecar_trials import read_readiness, wait_until

SECONDS = float(os.environ.get("PRICE_KEEPER_MEMORY_SECONDS", "4"))
NO_CGROUP = why_unavailable()
MEBIBYTE = 2**20
LIMIT = 512 * MEBIBYTE  # as in deploy/kubernetes/sidecar.yaml
CALLERS, BODY_BYTES = 200, 20_000_000
STRANGERS, FRAME_BYTES = 60, 2**24 - 1
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
FRAME_HEAD = FRAME_BYTES.to_bytes(3) + bytes([0, 0, 0, 0, 0, 1])
PIECE = b"x" * 262_144
HEAD = (
    b"POST /model/premium/converse HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
    b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n"
)
ANSWER = json.dumps(
    {
        "output": {"message": {"role": "assistant", "content": [{"text": "read"}]}},
        "stopReason": "end_turn",
        "usage": {"inputTokens": 1, "outputTokens": 1, "totalTokens": 2},
        "metrics": {"latencyMs": 1},
    }
).encode()


class Bedrock:
    """Reads bodies while it may, and keeps nothing of them. It runs in a thread of its own, as do all who call."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.may_read = asyncio.Event()
        self.url = ""

    async def serve(self) -> None:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0, limit=65_536)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                left = next(int(line[15:]) for line in head.split(b"\r\n") if line[:15].lower() == b"content-length:")
                await self.may_read.wait()
                while left and (part := await reader.read(min(left, len(PIECE)))):
                    left -= len(part)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
                writer.write(b"content-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER))
                await writer.drain()
        writer.close()


@contextmanager
def slow_bedrock() -> Iterator[Bedrock]:
    bedrock = Bedrock()
    thread = threading.Thread(target=bedrock.loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(bedrock.serve(), bedrock.loop).result(10)
        yield bedrock
    finally:
        asyncio.run_coroutine_threadsafe(bedrock.stop(), bedrock.loop).result(10)
        bedrock.loop.call_soon_threadsafe(bedrock.loop.stop)
        thread.join()
        bedrock.loop.close()


async def _call(port: int, head: bytes, end: bytes, answers: Counter[str]) -> None:
    """One large body, sent as fast as it is read; the response ends it."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        answers["no connection"] += 1
        return
    answered = asyncio.ensure_future(reader.readline())
    try:
        writer.write(head)
        left = BODY_BYTES
        while left and not answered.done():
            writer.write(PIECE[:left])
            left -= min(left, len(PIECE))
            await writer.drain()
        writer.write(end)
        answers[(await answered)[9:12].decode() or "cut"] += 1
    except ConnectionError:
        answers["cut"] += 1
    finally:
        answered.cancel()
        writer.transport.abort()


async def _threaten(port: int) -> None:
    """A frame of 16 MB, from which the sidecar should read only the header."""
    with suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(HELLO + FRAME_HEAD)
            left = FRAME_BYTES - 1
            while left:
                writer.write(PIECE[:left])
                left -= min(left, len(PIECE))
                await asyncio.wait_for(writer.drain(), 5)
            await asyncio.sleep(1)  # the last byte never comes
        finally:
            writer.transport.abort()


async def _call_concurrently(lineup: SidecarSetup, bedrock: Bedrock, group: Cgroup) -> tuple[Counter[str], int]:
    """All at once; their statuses, and the peak memory of the sidecar during that."""
    answers: Counter[str] = Counter()
    begin, end = b'{"messages":[{"role":"user","content":[{"text":"', b'"}]}]}'
    head = HEAD % (lineup.token().encode(), len(begin + end) + BODY_BYTES) + begin
    callers = [asyncio.ensure_future(_call(lineup.port, head, end, answers)) for _ in range(CALLERS)]
    strangers = [asyncio.ensure_future(_threaten(lineup.port)) for _ in range(STRANGERS)]
    most, begun = 0, time.monotonic()
    try:
        while not all(each.done() for each in (*callers, *strangers)):
            most = max(most, group.resident_bytes)
            if answers.total() > CALLERS // 2 or time.monotonic() > begun + 10:  # it is full, and refuses
                bedrock.loop.call_soon_threadsafe(bedrock.may_read.set)
            await asyncio.sleep(0.02)
    finally:
        for each in (*callers, *strangers):
            each.cancel()
    await asyncio.gather(*callers, *strangers)
    bedrock.loop.call_soon_threadsafe(bedrock.may_read.clear)
    return answers, most


@pytest.mark.skipif(bool(NO_CGROUP), reason=NO_CGROUP)
@pytest.mark.parametrize("workers", [1, 2])
def test_documented_load_fits_into_shipped_limit_and_memory_is_released(tmp_path: Path, workers: int) -> None:
    with slow_bedrock() as bedrock, cgroup() as group:
        group.limit(LIMIT)
        lineup = SidecarSetup(tmp_path, bedrock.url, {"path": str(tmp_path / "price-keeper.db")})
        lineup.wrapper_command, lineup.options = (
            group.wrapper_command,
            ("--workers", str(workers)) if workers > 1 else (),
        )
        lineup.write_config()
        with lineup.run_sidecar() as running:
            at_rest, deadline, peak = group.resident_bytes, time.monotonic() + SECONDS, 0
            answers: Counter[str] = Counter()
            while not answers or time.monotonic() < deadline:
                of_round, most = asyncio.run(_call_concurrently(lineup, bedrock, group))
                answers += of_round
                peak = max(peak, most)
                assert group.count_killed == 0
                assert running.process.poll() is None
            wait_until(lambda: group.resident_bytes < at_rest + workers * 24 * MEBIBYTE)
            wait_until(lambda: set(read_readiness(running.control).values()) == {"ok"})
            left = group.resident_bytes
            assert running.stop() == 0
        assert set(answers) <= {"200", "503", "cut"}
        assert answers["200"] >= 2 * workers
        assert answers["503"] + answers["cut"] > 0
        assert group.count_killed == 0
    summary = f"{at_rest / MEBIBYTE:.0f} MiB at rest, {peak / MEBIBYTE:.0f} at most, {left / MEBIBYTE:.0f} afterwards"
    print(f"{workers} in {LIMIT // MEBIBYTE} MiB: {summary}, {dict(answers)}")
