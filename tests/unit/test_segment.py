"""A segment of the journal: room that is taken beforehand, and a file that holds nothing but whole lines."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
from price_keeper.ledger import segment as module
from price_keeper.ledger.segment import Segment, decode_lines, encode_line

NAME = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


@pytest.mark.parametrize("room", [0, 100, 5000, 64 * 1024])
def test_lines_are_contiguous_whatever_the_preallocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(module, "MAX_ROOM_BYTES", room)
    segment = Segment(tmp_path, NAME)
    contents = [b'["I",%d,"%b"]' % (number, b"x" * (number * 37 % 9000)) for number in range(60)]
    for content in contents:
        segment.append(content)
        assert decode_lines(segment.path.read_bytes()).corrupt_lines == 0
    segment.append_all(contents)
    segment.append(b"[]")
    segment.close()
    assert segment.path.read_bytes() == b"".join(map(encode_line, [*contents, *contents, b"[]"]))


def test_reopened_segment_continues_at_its_end(tmp_path: Path) -> None:
    for content in (b"[1]", b"[2]", b"[3]"):
        segment = Segment(tmp_path, NAME)
        segment.append(content)
        segment.close()
    assert decode_lines(segment.path.read_bytes()).values == [[1], [2], [3]]


@pytest.mark.parametrize("written", [0, 1, 9])
def test_full_disk_leaves_written_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int) -> None:
    segment, write, calls = Segment(tmp_path, NAME), os.pwrite, []

    def full(file: int, data: bytes, at: int) -> int:
        calls.append(at)
        if len(calls) == 1 and written:
            return write(file, data[:written], at)
        raise OSError(28, "No space left on device")

    segment.append(b"[1]")
    monkeypatch.setattr(os, "pwrite", full)
    size = segment.path.stat().st_size
    with pytest.raises(OSError, match="No space left"):
        segment.append(b'["%b"]' % (b"x" * size))
    assert segment.path.stat().st_size == size
    segment.append(b"[2]")  # there is still room for this one
    monkeypatch.setattr(os, "pwrite", write)
    segment.append(b'["%b"]' % (b"y" * size))
    segment.close()
    assert decode_lines(segment.path.read_bytes()).values == [[1], [2], ["y" * size]]


@pytest.mark.parametrize("free", [4096, 8191, 100_000])
def test_nearly_full_disk_gives_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    segment, write = Segment(tmp_path, NAME), os.pwrite

    def little(file: int, data: bytes, at: int) -> int:
        if at + len(data) > free:
            raise OSError(28, "No space left on device")
        return write(file, data, at)

    monkeypatch.setattr(os, "pwrite", little)
    content, count = b'["%b"]' % (b"x" * 100), 0
    while segment.size + len(encode_line(content)) <= free:
        segment.append(content)
        count += 1
    with pytest.raises(OSError, match="No space left"):
        segment.append(content)
    segment.close()
    assert len(decode_lines(segment.path.read_bytes()).values) == count > free // 200


def test_seal_of_reopened_segment_allocates_only_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment, write, taken = Segment(tmp_path, NAME, is_mapped=False), os.pwrite, []
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: taken.append(len(data)) or write(file, data, at))
    segment.append_all((b"[1]", b"[2]"))
    segment.sync()
    segment.close()
    assert sum(taken) == segment.path.stat().st_size == len(encode_line(b"[1]") * 2)


@pytest.mark.parametrize("windows", [0, 1])
def test_unmappable_file_is_written_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, windows: int) -> None:
    """As on some file systems in user space and over a network."""
    segment, calls = Segment(tmp_path, NAME), []

    def refuses(*arguments: Any, **more: Any) -> mmap:
        calls.append(1)
        if len(calls) > windows:
            raise OSError(errno.ENODEV, "No such device")
        return mmap(*arguments, **more)

    monkeypatch.setattr(module, "mmap", refuses)
    contents = [b'[%d,"%b"]' % (number, b"x" * 9000) for number in range(20)]
    for content in contents:
        segment.append(content)
    assert len(calls) == windows + 1
    assert segment.path.stat().st_size == segment.size
    segment.close()
    assert segment.path.read_bytes() == b"".join(map(encode_line, contents))


@pytest.mark.parametrize("call", ["ftruncate", "close"])
def test_failing_close_is_logged_and_leaks_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    before, real = len(os.listdir("/proc/self/fd")), os.close
    segment = Segment(tmp_path, NAME)
    segment.append(b"[1]")

    def fails(file: int, *_: int) -> None:
        if call == "close":
            real(file)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        segment.close()
    segment.close()
    assert "cannot be closed cleanly; its lines are complete: Input/output error" in caplog.text
    assert len(os.listdir("/proc/self/fd")) == before
    for append in (lambda: segment.append(b"[2]"), lambda: segment.append_all([b"[2]"])):
        with pytest.raises(OSError, match="Bad file descriptor"):
            append()
    assert decode_lines(segment.path.read_bytes()).values == [[1]]


DYING = """
import os, signal, sys
from pathlib import Path
from price_keeper.ledger.segment import Segment
segment = Segment(Path(sys.argv[1]), sys.argv[2])
for number in range(1000):
    segment.append(b"[%d]" % number)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_appended_line_survives_kill(tmp_path: Path) -> None:
    died = subprocess.run([sys.executable, "-c", DYING, str(tmp_path), NAME], check=False, timeout=60)
    assert died.returncode == -signal.SIGKILL
    data = (tmp_path / f"{NAME}{module.SEGMENT_SUFFIX}").read_bytes()
    found = decode_lines(data)
    assert found.values == [[number] for number in range(1000)]
    assert found.corrupt_lines == 0
    assert set(data[found.end :]) == {0}
    again = Segment(tmp_path, NAME)  # by a successor who has not cut the zeros off
    again.append(b'["S"]')
    again.close()
    assert decode_lines(again.path.read_bytes()).values[-1] == ["S"]


def test_hole_after_power_cut_loses_only_its_lines(tmp_path: Path) -> None:
    whole = encode_line(b"[1]") + encode_line(b"[2]") + encode_line(b"[3]")
    torn = whole[:15] + bytes(40) + encode_line(b"[4]") + bytes(7) + encode_line(b"[5]") + b"0000 to" + bytes(9)
    found = decode_lines(torn)
    assert found.values == [[1], [4], [5]]
    assert found.corrupt_lines == 2  # the second line, and what may have been the last
    assert found.end == len(torn) - 16


def test_missing_memory_for_mapping_is_like_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal still has to write the line then, and does so later."""
    segment, write = Segment(tmp_path, NAME), os.pwrite

    def none(*_: Any) -> int:
        raise MemoryError

    monkeypatch.setattr(os, "pwrite", none)
    with pytest.raises(OSError, match="Cannot allocate memory") as refused:
        segment.append(b"[1]")
    assert refused.value.errno == errno.ENOMEM
    monkeypatch.setattr(os, "pwrite", write)
    segment.append(b"[2]")
    segment.close()
    assert decode_lines(segment.path.read_bytes()).values == [[2]]


def test_unmappable_files_are_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_descriptor(*_: Any, **__: Any) -> mmap:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(module, "mmap", no_descriptor)
    for name in (NAME, NAME[:-1] + "W", NAME[:-1] + "X"):
        segment = Segment(tmp_path, name)
        segment.append(b"[1]")
        segment.close()
    message = (
        f"files in {tmp_path} cannot be memory-mapped, so each line is a separate, slower write: Too many open files"
    )
    assert [record.getMessage() for record in caplog.records] == [message]
