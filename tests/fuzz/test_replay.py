"""What fuzzing has kept, and all it ever found, played without a fuzzer."""

from __future__ import annotations

import random

import pytest

from tests.fuzz import keep
from tests.fuzz.places import FOUND, KEPT, inputs, played
from tests.fuzz.reader import Reader, pieces
from tests.fuzz.run import came_of, main
from tests.fuzz.targets import NAMES, target, words

MOST_FILES = 200
MOST_BYTES = 300_000


@pytest.mark.parametrize("name", NAMES)
def test_kept_and_found_inputs_pass(name: str) -> None:
    one, kept = target(name), played(name)
    assert kept
    for path in kept:
        one(path.read_bytes())


@pytest.mark.parametrize("name", NAMES)
def test_arbitrary_inputs_pass(name: str) -> None:
    """Nothing, noise, and what is kept after a few slips: as a fuzzer begins."""
    one, chance = target(name), random.Random(11)
    one(b"")
    for path in played(name)[:6]:
        data = bytearray(path.read_bytes())
        for _ in range(3):
            at = chance.randrange(len(data) + 1)
            data[at : at + chance.randrange(3)] = chance.choice((*words(name), chance.randbytes(2)))
            one(bytes(data))
        one(chance.randbytes(40))


def test_corpus_is_small_and_covers() -> None:
    kept = [path for name in NAMES for path in inputs(KEPT / name)]
    assert 100 < len(kept) <= MOST_FILES
    assert sum(path.stat().st_size for path in kept) <= MOST_BYTES
    assert {path.name for path in KEPT.iterdir()} == set(NAMES)
    assert {path.name for path in FOUND.iterdir() if path.is_dir()} <= set(NAMES)


def test_every_input_is_decoded() -> None:
    reader = Reader(b"\x05\x01\x02abc")
    assert (reader.pick("abc"), reader.number(2), reader.take(2), reader.left) == ("c", 258, b"ab", 1)
    assert (reader.rest(), reader.byte(), reader.pick("abc"), reader.number(3), reader.some()) == (b"c", 0, "a", 0, b"")
    for seed in range(40):
        assert b"".join(pieces(b"some data", seed)) == b"some data"
        assert pieces(b"some data", seed) == pieces(b"some data", seed)


def test_shortest_input_per_path_is_kept() -> None:
    one = target("paths")
    short, long, other = b"\x00\x03\x00\x1d\x01", b"\x00\x03\x00\x1d\x01 and more of it", b"\x01\x01\x18"
    kept = keep.chosen(one, [long, short, other])
    assert kept.index(short) < kept.index(long)
    assert kept.index(other) < kept.index(long)


def test_missing_atheris_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tests.fuzz.run.find_spec", lambda _: None)
    assert main(["--seconds", "1"]) == 2
    assert "atheris is not installed here" in capsys.readouterr().out


SAID = """
#2	INITED cov: 80 ft: 90 corp: 3/10b exec/s: 0 rss: 40Mb
#4096	pulse  cov: 124 ft: 194 corp: 33/198b lim: 25 exec/s: 2048 rss: 82Mb
"""
FELL = """
 === Uncaught Python exception: ===
Differs: the body: b'a' is not b'b'

==7== ERROR: libFuzzer: fuzz target exited
"""


def test_target_result_is_reported() -> None:
    clean = came_of("http2", 2.0, SAID, 0)
    assert (clean.executions, clean.edges, clean.features, clean.corpus) == (4096, 124, 194, 33)
    assert str(clean).split() == ["http2", "2", "s", "4,096", "2,048", "124", "194", "33", "clean"]
    fallen = came_of("http2", 2.0, SAID + FELL, 77)
    assert fallen.trouble == "Differs: the body: b'a' is not b'b'"
    assert "FOUND" in str(fallen)
    assert "ended with -9" in came_of("http2", 2.0, SAID, -9).trouble
