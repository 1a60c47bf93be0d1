"""Which jobs were paid already: known by caller, of the newest of each, and of no more callers than fit."""

from __future__ import annotations

from price_keeper.model import Caller
from price_keeper.recording.jobs import MOST_CALLERS, MOST_JOBS, Jobs


def caller(org: int) -> Caller:
    return Caller(f"00000000-0000-0000-0000-{org:012}", "web", "c")


def test_a_job_is_new_once_to_each_caller() -> None:
    jobs = Jobs()
    assert [jobs.is_new(caller(1), arn) for arn in ("a", "a", "b")] == [True, False, True]
    assert [jobs.is_new(caller(2), "a"), jobs.is_new(caller(2), "a")] == [True, False]


def test_the_oldest_are_forgotten_first_and_only_the_callers_own() -> None:
    jobs = Jobs()
    assert jobs.is_new(caller(2), "other")
    for number in range(MOST_JOBS):
        assert jobs.is_new(caller(1), str(number))
    assert not jobs.is_new(caller(1), "0")  # and is the newest now
    assert jobs.is_new(caller(1), "one more")
    assert not jobs.is_new(caller(1), "0")
    assert jobs.is_new(caller(1), "1")
    assert not jobs.is_new(caller(2), "other")


def test_callers_who_started_none_for_long_are_forgotten() -> None:
    jobs = Jobs()
    for number in range(MOST_CALLERS + 1):
        assert jobs.is_new(caller(number), "a")
    assert not jobs.is_new(caller(1), "a")
    assert jobs.is_new(caller(0), "a")
