"""The machine: which core does what, whether it is quiet, and what the system says of a process."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from price_keeper.errors import PriceKeeperError

PAGE, TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
STOP_SECONDS = 15.0
START_SECONDS = 90.0  # LiteLLM takes half a minute on a slow machine

QUIET_SHARE = 0.05  # of all cores: up to it other programs may be at work on a quiet machine
LOOK_SECONDS = 5.0
PATIENCE = 240.0  # for a quiet machine

CORES = sorted(os.sched_getaffinity(0))
PROXY_CORE, OTHER_CORE = CORES[0], CORES[-1]  # one for what is measured, the other for load and upstream


class CannotMeasure(PriceKeeperError):
    """Something that the measurement needs is not there."""


def found(program: str) -> str | None:
    """Where a program is; distributions put servers where users' paths do not lead."""
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin")


def needed(program: str, package: str) -> str:
    path = found(program)
    if path is None:
        raise CannotMeasure(f"{program} is needed to measure (Debian's package {package})")
    return path


@contextmanager
def process(
    command: Sequence[str],
    core: int | Sequence[int],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    output: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """On its core alone; ended whatever happens."""
    cores = {core} if isinstance(core, int) else set(core)
    sink = output.open("wb") if output is not None else subprocess.DEVNULL
    started = subprocess.Popen(
        command,
        cwd=folder,
        env=None if environment is None else dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=sink,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        if output is not None:
            sink.close()  # type: ignore[union-attr]


def wait_until(is_so: Callable[[], bool], what: str, seconds: float = START_SECONDS, pause: float = 0.01) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise CannotMeasure(f"{what}: not in {seconds:g} s")
        time.sleep(pause)


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in listed for each in family(int(child)))]


def cpu_seconds(pid: int) -> float:
    """Of a process and its children, to the nanosecond; threads that have ended count too."""
    return sum(time.clock_gettime(_clock(member)) for member in family(pid))


def _clock(pid: int) -> int:
    """What clock_getcpuclockid(3) gives: the number of a process, inverted, before the bits of its kind of clock."""
    return (~pid << 3) | 2


def busy_seconds(core: int) -> float:
    """How long a core has been at work for anybody, what the host took of it included."""
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name == f"cpu{core}":
            user, nice, system, _idle, _waiting, *interrupted = (int(each) for each in ticks[:8])
            return (user + nice + system + sum(interrupted)) / TICKS
    raise CannotMeasure(f"the system knows no core {core}")


def busy_share(seconds: float = LOOK_SECONDS, cores: Sequence[int] = CORES) -> float:
    """Which part of these cores is in use."""
    before, began = sum(map(busy_seconds, cores)), time.monotonic()
    time.sleep(seconds)
    return (sum(map(busy_seconds, cores)) - before) / (time.monotonic() - began) / len(cores)


def wait_until_quiet(
    patience: float, look: Callable[[], float] = busy_share, now: Callable[[], float] = time.monotonic
) -> float:
    """The share of all cores that other programs use, once it is at most QUIET_SHARE or patience is over."""
    until = now() + patience
    while (share := look()) > QUIET_SHARE and now() < until:
        pass
    return share


def describe_quiet(before: float, after: float) -> str:
    """Whether a run can be trusted, of what other programs used before and after it."""
    used = f"other programs used {before:.0%} of the cores before the run and {after:.0%} after it"
    return f"{'yes' if max(before, after) <= QUIET_SHARE else '**no**'}: {used}"


def memory_bytes(pid: int) -> int:
    """What a process and its children have for themselves: shared pages count once, by their parts."""
    total = 0
    for member in family(pid):
        for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def described() -> str:
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    system = f"{platform.system()} {platform.release().partition('-')[0]}"
    return f"{len(CORES)} cores of {model}, {system}, CPython {platform.python_version()}"


def processor_seconds(pid: int) -> float:
    """Of all its threads, those that have ended among them; in steps of a hundredth of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def own_bytes(pid: int) -> int:
    """Memory that is in no file: pages that are shared are lighter or heavier with who else is there."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def bytes_in(folder: Path) -> int:
    """Of all files in a folder; one that is deleted meanwhile counts nothing."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue
    return total
