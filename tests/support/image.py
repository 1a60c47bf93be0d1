"""Carries out the Dockerfile without Docker: each stage is a directory, each RUN a shell in it by chroot.

In the place of the base image stands a minimal Debian with its own Python. So the result is what the Dockerfile's
steps make, in a root that had nothing else; it is no image, and layers and registries are not tried.
`python -m tests.support.image` (`make image-root`) makes it in build/image/root. It needs root and debootstrap.
"""

from __future__ import annotations

import fnmatch
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "image"
PACKAGES = "ca-certificates,libpython3-dev,python3,python3-pip,python3-venv"  # as the base image has, with headers
SECONDS = 1200


@dataclass
class Stage:
    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def parsed(text: str) -> tuple[dict[str, str], list[Stage]]:
    """The arguments before the first FROM, and the stages."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^[ \t]*#.*\n", "", text, flags=re.MULTILINE))
    before: dict[str, str] = {}
    stages: list[Stage] = []
    for line in filter(None, (each.strip() for each in joined.splitlines())):
        word, rest = line.split(None, 1)
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(base, name))
        elif not stages:
            assert word == "ARG", line
            before |= dict([rest.split("=", 1)])
        else:
            stages[-1].steps.append((word, rest))
    return before, stages


@dataclass
class Image:
    """A directory, and what stands beside its files."""

    root: Path
    variables: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"})
    folder: str = "/"
    user: str = "0:0"
    labels: dict[str, str] = field(default_factory=dict)
    volumes: list[str] = field(default_factory=list)
    ports: list[str] = field(default_factory=list)
    entry: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)


class Builder:
    """`given` are build arguments."""

    def __init__(self, dockerfile: Path, place: Path, build_arguments: Mapping[str, str]) -> None:
        self._context = dockerfile.parent
        self._before, self._stages = parsed(dockerfile.read_text())
        self._place = place
        self._build_arguments = build_arguments
        self._images: dict[str, Image] = {}

    def build(self) -> Image:
        base = base_root(self._place)
        image = None
        for number, stage in enumerate(self._stages):
            root = self._place / (stage.name or "root")
            _empty_folder(root)
            _run("cp", "-a", f"{base}/.", root)
            image = Image(root)
            self._images[stage.name or str(number)] = image
            self._run_step(stage, image)
        assert image is not None
        return image

    def _run_step(self, stage: Stage, image: Image) -> None:
        arguments: dict[str, str] = {}
        for word, rest in stage.steps:
            known_variables = {**arguments, **image.variables}
            if word == "ARG":
                name, _, default = rest.partition("=")
                arguments[name] = self._build_arguments.get(name, default or self._before.get(name, ""))
            elif word == "RUN":
                self._shell(image, rest, known_variables)
            elif word == "COPY":
                self._copy(image, shlex.split(rest))
            elif word in ("ENV", "LABEL"):
                pairs = dict(each.split("=", 1) for each in shlex.split(rest))
                variables = {name: _expand_variables(value, known_variables) for name, value in pairs.items()}
                (image.variables if word == "ENV" else image.labels).update(variables)
            else:
                self._set(image, word, rest)

    def _set(self, image: Image, word: str, rest: str) -> None:
        if word == "WORKDIR":
            image.folder = rest
            (image.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "HEALTHCHECK":
            image.healthcheck = json.loads(rest.partition("CMD ")[2])
        elif word in ("ENTRYPOINT", "CMD"):
            setattr(image, "entry" if word == "ENTRYPOINT" else "command", json.loads(rest))
        elif word in ("VOLUME", "EXPOSE"):
            (image.volumes if word == "VOLUME" else image.ports).extend(rest.split())
        elif word == "USER":
            image.user = rest
        else:
            raise ValueError(f"{word} is not known here")

    def _copy(self, image: Image, words: list[str]) -> None:
        source = self._context
        context = True
        if words[0].startswith("--from="):
            source, context = self._images[words.pop(0).removeprefix("--from=")].root, False
        *names, target = words
        to = image.root / (Path(image.folder) / target).as_posix().lstrip("/")
        for name in names:
            found = source / name.lstrip("/")
            into = to / found.name if target.endswith("/") and not found.is_dir() else to
            into.parent.mkdir(parents=True, exist_ok=True)
            if not context:
                _run("cp", "-a", "-T", found, into)
            else:
                self._copy_from_context(found, into)

    def _copy_from_context(self, found: Path, into: Path) -> None:
        files = [each for each in ([found] if found.is_file() else sorted(found.rglob("*"))) if each.is_file()]
        sent = [each for each in files if is_sent(each.relative_to(self._context).as_posix(), self._context)]
        assert sent, f"{found} is not in the context"
        for each in sent:
            to = into if found.is_file() else into / each.relative_to(found)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(each, to)

    def _shell(self, image: Image, command: str, variables: Mapping[str, str]) -> None:
        with _lend_files(image.root, "/etc/resolv.conf", "/etc/hosts"), _pip(image.root) as settings:
            environment = {**variables, **settings, **_proxy_settings(), "DEBIAN_FRONTEND": "noninteractive"}
            inside = ["sh", "-ec", f"cd {shlex.quote(image.folder)} && {command}"]
            _run("chroot", image.root, *inside, env=environment)


@contextmanager
def _lend_files(root: Path, *names: str) -> Iterator[None]:
    """Files of this machine, as they stand in the root while something runs there, as Docker does it."""
    places = {root / name.lstrip("/"): Path(name) for name in names}
    before = {place: place.read_bytes() if place.exists() else None for place in places}
    for place, name in places.items():
        shutil.copy(name, place)
    try:
        yield
    finally:
        for place, content in before.items():
            place.unlink()
            if content is not None:
                place.write_bytes(content)


def is_sent(name: str, context: Path) -> bool:
    """Whether .dockerignore lets it through: the last pattern that fits decides."""
    lines = (context / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    parents = ["/".join(name.split("/")[: length + 1]) for length in range(name.count("/") + 1)]
    sent = True
    for pattern in patterns:
        if any(_matches(parent, pattern.removeprefix("!")) for parent in parents):
            sent = pattern.startswith("!")
    return sent


def _matches(name: str, pattern: str) -> bool:
    """A star stands for no slash, and `**/` for any folders."""
    parts = name.split("/")
    if pattern.startswith("**/"):
        return fnmatch.fnmatchcase(parts[-1], pattern.removeprefix("**/"))
    wanted = pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def base_root(place: Path) -> Path:
    """Made once, since it takes a minute."""
    base = place / "base"
    done = place / ".base"
    if done.exists() and done.read_text() == PACKAGES:
        return base
    _empty_folder(base)
    suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
    completed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE) $(RELEASE)", "Created-By: Packages", "Component: main"],
        capture_output=True,
        text=True,
        check=True,
    )
    mirror = next(line.split()[0] for line in completed.stdout.splitlines() if line.split()[1] == suite)
    _run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, base, mirror)
    for name in ("python", "python3"):
        (base / "usr/local/bin" / name).symlink_to("/usr/bin/python3")
    done.write_text(PACKAGES)
    return base


def added_paths(image: Image, place: Path = PLACE) -> Iterator[str]:
    """What the image has and its base has not, as paths from its root."""
    base = place / "base"
    for folder, folders, files in os.walk(image.root):
        for name in (*folders, *files):
            path = Path(folder, name).relative_to(image.root)
            if not os.path.lexists(base / path):
                yield path.as_posix()


@contextmanager
def _pip(root: Path) -> Iterator[dict[str, str]]:
    """Where pip finds packages, as it is set up on this machine. Its certificates have to be inside as well."""
    completed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    found = re.findall(r"^(?:global|install|:env:)\.([a-z-]+)=(.*)$", completed.stdout, re.MULTILINE)
    settings = {f"PIP_{name.upper().replace('-', '_')}": value.strip("'\"") for name, value in found}
    settings |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    certificates = Path(settings.get("PIP_CERT", ""))
    if not certificates.is_file():
        yield settings
        return
    inside = root / "run" / "pip-certificates.pem"
    shutil.copy(certificates, inside)
    try:
        yield {**settings, "PIP_CERT": "/run/pip-certificates.pem"}
    finally:
        inside.unlink()


def _proxy_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}


def _expand_variables(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda found: variables.get(found[1], ""), text)


def _empty_folder(folder: Path) -> None:
    if folder.exists():
        _run("rm", "-rf", "--one-file-system", folder)
    folder.mkdir(parents=True)


def _run(*command: str | Path, env: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(
        [str(each) for each in command], env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(map(str, command))}: {done.stdout[-2000:]}{done.stderr[-4000:]}")


def why_unavailable() -> str:
    """Why not here; empty if it can be tried."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root on Linux can make the root of the image"
    missing_commands = [
        name for name in ("apt-get", "chroot", "debootstrap", "setpriv", "unshare") if shutil.which(name) is None
    ]
    return f"to make the root of the image takes {', '.join(missing_commands)}" if missing_commands else ""


def _measure_megabytes(root: Path) -> float:
    """What its files take, each once, whatever the disk's blocks."""
    sizes: dict[int, int] = {}
    for folder, _, files in os.walk(root):
        for name in files:
            status = os.lstat(Path(folder, name))
            sizes[status.st_ino] = status.st_size
    return sum(sizes.values()) / 1e6


def main() -> int:
    why = why_unavailable()
    if why:
        print(why, file=sys.stderr)
        return 1
    given = dict(each.split("=", 1) for each in sys.argv[1:])
    image = Builder(ROOT / "Dockerfile", PLACE, given).build()
    print(f"{image.root}: {shlex.join([*image.entry, *image.command])}, as {image.user}")
    print(f"{_measure_megabytes(image.root):.0f} MB, of which its base has {_measure_megabytes(PLACE / 'base'):.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
