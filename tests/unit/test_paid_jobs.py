"""Which jobs were paid already: by caller, the newest of each, for a bounded number of callers."""

from __future__ import annotations

from price_keeper.domain import Caller
from price_keeper.usage.meter import MAX_CALLERS_WITH_JOBS, MAX_JOBS_PER_CALLER, PaidJobs


def caller(org: int) -> Caller:
    return Caller(f"00000000-0000-0000-0000-{org:012}", "web", "c")


def test_job_is_new_once_per_caller() -> None:
    jobs = PaidJobs()
    assert [jobs.add_if_new(caller(1), arn) for arn in ("a", "a", "b")] == [True, False, True]
    assert [jobs.add_if_new(caller(2), "a"), jobs.add_if_new(caller(2), "a")] == [True, False]


def test_oldest_jobs_of_same_caller_are_evicted_first() -> None:
    jobs = PaidJobs()
    assert jobs.add_if_new(caller(2), "other")
    for number in range(MAX_JOBS_PER_CALLER):
        assert jobs.add_if_new(caller(1), str(number))
    assert not jobs.add_if_new(caller(1), "0")  # and is the newest now
    assert jobs.add_if_new(caller(1), "one more")
    assert not jobs.add_if_new(caller(1), "0")
    assert jobs.add_if_new(caller(1), "1")
    assert not jobs.add_if_new(caller(2), "other")


def test_callers_without_recent_jobs_are_evicted() -> None:
    jobs = PaidJobs()
    for number in range(MAX_CALLERS_WITH_JOBS + 1):
        assert jobs.add_if_new(caller(number), "a")
    assert not jobs.add_if_new(caller(1), "a")
    assert jobs.add_if_new(caller(0), "a")
