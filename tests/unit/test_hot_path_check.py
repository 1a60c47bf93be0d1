"""The gate that a slower hot path does not get through; the counting itself needs callgrind (`make bench-check`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import check, hotpath


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(check, "KEPT", tmp_path / "check.json")
    return tmp_path / "check.json"


@pytest.mark.parametrize(("ratio", "code"), [(50.0, 0), (109.9, 0), (110.1, 1)])
def test_tenth_more_instructions_fails_check(ratio: float, code: int) -> None:
    check.keep({"request": 100.0})
    assert check.checked({"request": ratio}) == code


@pytest.mark.parametrize("slower", hotpath.ALL)
def test_check_of_one_slower_kind_of_traffic_fails(slower: str) -> None:
    ratios = dict.fromkeys(hotpath.ALL, 100.0)
    check.keep(ratios)
    assert check.checked(ratios) == 0
    assert check.checked(ratios | {slower: 111.0}) == 1


def test_check_without_baseline_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.checked({"request": 1.0}) == 1
    assert "--keep" in capsys.readouterr().out


def test_each_python_and_kind_of_traffic_has_its_own(kept: Path) -> None:
    kept.write_text(json.dumps({"2.7": {"request": 12.0}, check.PYTHON: {"sdk": 60.0}}))
    check.keep({"request": 50.0})
    assert json.loads(kept.read_text()) == {"2.7": {"request": 12.0}, check.PYTHON: {"request": 50.0, "sdk": 60.0}}


def test_callgrind_output_without_total_is_reported(tmp_path: Path) -> None:
    (tmp_path / "counts.1").write_text("events: Ir\n")
    with pytest.raises(SystemExit, match="no total"):
        check._total(tmp_path / "counts.1")


def test_reference_program_result_never_changes() -> None:
    """Or what is kept would mean something else."""
    assert check.fixed_program() == 928_890


def test_run_that_never_ends_is_reported_as_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "SECONDS", 0.1)
    with pytest.raises(SystemExit, match="never ended"):
        check._counted(["sleep", "5"], str(tmp_path))
    assert capsys.readouterr().out.count("did not end") == check.TRIES
    with pytest.raises(SystemExit, match="did not count"):
        check._counted(["false"], str(tmp_path))
    check._counted(["true"], str(tmp_path))
