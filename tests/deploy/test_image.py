"""The steps of the Dockerfile and of the systemd page, done in a directory, and what comes of them.

There is no Docker here: each absolute path is taken to be below a directory, and programs that
change the machine do nothing. pip sees those packages of the test environment that the extras ask
for, and no others; what was installed runs as another user, if the tests may change theirs.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from packaging.requirements import Requirement
from tests.waiting import wait_until

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "deployment.md").read_text()
SENT = (ROOT / ".dockerignore").read_text().splitlines()
USER = 10_001
# Programs that would change the machine, and what they do instead, with the arguments "$@".
HARMLESS = {
    "useradd": "while [ $# -gt 1 ]; do "
    'if [ "$1" = --home-dir ]; then mkdir -p "$2"; OWN "$2"; fi; shift; done',
    "apt-get": ":",
    "systemctl": ":",
}
LISTENERS = {f"PENSTOCK_LISTEN_{each}": "127.0.0.1:0" for each in ("NATIVE", "HTTP", "FLIGHT")}


def needed(*names: str) -> Iterator[Distribution]:
    """Give the packages that some requirements come to, as the test environment has them."""
    seen: set[tuple[str, str]] = set()
    rest = [Requirement(name) for name in names]
    while rest:
        requirement = rest.pop()
        extras = {"", *requirement.extras}
        new = {(requirement.name.lower(), extra) for extra in extras} - seen
        if new:
            seen |= new
            found = distribution(requirement.name)
            yield found
            for each in map(Requirement, found.requires or ()):
                marker = each.marker
                if marker is None or any(marker.evaluate({"extra": extra}) for _, extra in new):
                    rest.append(each)


@cache
def python() -> Path:
    """Return a Python that other users reach: a copy, if root's home has it."""
    if is_open(Path(sys.base_prefix)):
        return Path(sys.executable)
    place = Path(tempfile.mkdtemp(prefix="penstock-python-"))
    atexit.register(shutil.rmtree, place)
    place.chmod(0o755)
    version = f"python3.{sys.version_info.minor}"
    library = Path(sys.base_prefix, "lib")
    left_out = ("site-packages", "test", "idlelib", "config-*")
    ignore = shutil.ignore_patterns(*left_out)
    shutil.copytree(library / version, place / "lib" / version, ignore=ignore)
    for each in library.glob("libpython*.so*"):
        shutil.copy(each, place / "lib")
    (place / "bin").mkdir()
    return Path(shutil.copy(Path(sys.base_prefix, "bin", version), place / "bin"))


def make_environment(place: Path, *names: str) -> None:
    """Make a virtual environment in which pip finds these packages installed, and nothing else."""
    subprocess.run([python(), "-m", "venv", "--without-pip", place], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    for found in needed("pip", *names):
        for part in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            link = site / part
            if found.name != "penstock" and not link.exists():
                link.symlink_to(Path(str(found.locate_file(part))))
    pip = place / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec "{place}/bin/python" -m pip "$@"\n')
    pip.chmod(0o755)


class Machine:
    """A directory that stands for a machine: its files, and the settings of what runs there."""

    def __init__(self, place: Path) -> None:
        self.root, self.bin = place / "root", place / "bin"
        self.cwd, self.env, self.entry, self.command = Path("/"), dict[str, str](), [""], [""]
        self.root.mkdir()
        self.bin.mkdir()
        own = f"chown {USER}:{USER}" if os.geteuid() == 0 else ":"
        for name, does in HARMLESS.items():
            self.put(name, does.replace("OWN", own))

    def put(self, name: str, does: str) -> None:
        """Make a program."""
        (self.bin / name).write_text(f"#!/bin/sh\n{does}\n")
        (self.bin / name).chmod(0o755)

    def here(self, text: str) -> str:
        """Take every absolute path of a text to be below the directory."""
        mapped = re.sub(r"(?:^|(?<=[\s=:\"'(]))/(?=\w)", f"{self.root}/", text)
        assert "rm -r" not in mapped or all(
            path.startswith(f"{self.root}/") for path in re.findall(r"(?<=\s)/\S*", mapped)
        )
        return mapped

    def run(
        self, line: str, *, other_user: bool = False, check: bool = True, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a line of a shell there."""
        self.below(self.cwd).mkdir(parents=True, exist_ok=True)
        command = ["sh", "-e", "-c", self.here(line)]
        return subprocess.run(
            command, check=check, text=True, stdout=subprocess.PIPE, **self.options(other_user, env)
        )

    def options(self, other_user: bool, env: dict[str, str]) -> dict[str, Any]:
        """Return the options of a process there."""
        path = f"{self.bin}:{os.environ['PATH']}"
        settings = {name: self.here(value) for name, value in {**self.env, **env}.items()}
        may = other_user and os.geteuid() == 0 and is_open(Path(sys.prefix))
        as_user = {"user": USER, "group": USER, "extra_groups": []} if may else {}
        # The page is to be followed offline, and its build uses what is installed.
        pip = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "false"}
        pip |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_COMPILE": "1"}
        # A copy of Python has its own library beside it.
        pip["LD_LIBRARY_PATH"] = str(python().parents[1] / "lib")
        return {"cwd": self.below(self.cwd), "env": {"PATH": path, **pip, **settings}, **as_user}

    def below(self, path: Path) -> Path:
        """Return where a path of the machine is."""
        return self.root / path.relative_to("/")


def is_open(path: Path) -> bool:
    return all(each.stat().st_mode & 0o001 for each in (path, *path.parents))


class Step(NamedTuple):
    name: str
    text: str


def steps(text: str) -> list[Step]:
    """Read a Dockerfile."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [Step(*line.split(None, 1)) for line in joined.splitlines()]


def begun(place: Path, name: str, base: Machine | None) -> Machine:
    """Begin a stage, on top of another one or of nothing."""
    place.mkdir()
    machine = Machine(place)
    if base is not None:
        machine.cwd, machine.env = base.cwd, dict(base.env)
        machine.entry, machine.command = base.entry, base.command
    extras = "" if name == "build" else extras_of(name)
    make_environment(place / "venv", f"penstock{extras}", "hatchling")
    for program in ("pip", "penstock", "python"):
        machine.put(program, f'exec "{place}/venv/bin/{program}" "$@"')
    return machine


def build(stages: dict[str, Machine], place: Path) -> None:
    """Do the steps of the Dockerfile."""
    (place / "none").mkdir()
    machine = Machine(place / "none")
    for step in steps((DEPLOY / "Dockerfile").read_text()):
        match step.name:
            case "FROM":
                base, *name = step.text.replace(" AS ", " ").split()
                if name:
                    machine = stages[name[0]] = begun(place / name[0], name[0], stages.get(base))
            case "WORKDIR":
                machine.cwd = Path(step.text)
            case "COPY":
                source, *names = [each for each in step.text.split() if "--from" not in each]
                origin = stages["build"].root if "--from" in step.text else ROOT
                if origin == ROOT:
                    # Docker sees nothing else.
                    assert {f"!{each}" for each in (source, *names[:-1])} <= set(SENT)
                *others, target = [source, *names]
                for each in others:
                    copy(origin / each.lstrip("/"), machine.below(machine.cwd / target))
            case "RUN":
                machine.run(step.text)
            case "ENV":
                machine.env |= dict(each.split("=", 1) for each in shlex.split(step.text))
            case "ENTRYPOINT":
                machine.entry = json.loads(step.text)
            case "CMD":
                machine.command = json.loads(step.text)
            case other:
                assert other in {"USER", "VOLUME", "EXPOSE"}, f"what does {other} do?"


def extras_of(stage: str) -> str:
    """Return the extras that a stage installs, with those of the stage below it."""
    installs = re.findall(r"\$\{wheel\}\[([a-z,]+)\]", (DEPLOY / "Dockerfile").read_text())
    return f"[{','.join(installs[: 1 if stage == 'server' else 2])}]"


def copy(origin: Path, target: Path) -> None:
    if origin.is_dir():
        shutil.copytree(origin, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(origin, target)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Give a directory that other users reach, as pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="penstock-image-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def stages(place: Path) -> dict[str, Machine]:
    made: dict[str, Machine] = {}
    build(made, place)
    return made


def blocks(heading: str) -> list[str]:
    """Return the commands of a section of the page."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return str(block).replace("\\\n", " ").splitlines()


def try_server(machine: Machine, command: list[str], secret: str, **env: str) -> None:
    """Run a server as another user, and be its client."""
    ports = machine.root / "var" / "lib" / "penstock" / "ports"
    settings = {**LISTENERS, "PENSTOCK_PORT_FILE": str(ports), **env}
    # Where the tests have put it, a path is not to be mapped once more.
    options = machine.options(True, env)
    options["env"] |= settings
    process = subprocess.Popen(command, **options)
    try:
        wait_until(lambda: ports.exists() or process.poll() is not None)
        assert process.poll() is None
        (port,) = re.findall(r"^native (\d+)$", ports.read_text(), re.MULTILINE)
        with penstock.connect(f"penstock://127.0.0.1:{port}", token=secret) as client:
            client.create_queue("orders")
            client.send("orders", b"x")
            assert client.claim("orders")
    finally:
        process.terminate()
        assert process.wait(60) == 0


def secret_in(told: str) -> str:
    (secret,) = re.findall(r"\bapp:\S+", told)
    return str(secret)


def test_the_image_is_built_and_serves_by_the_commands_of_the_page(
    stages: dict[str, Machine],
) -> None:
    _, *runs = blocks("An image")
    server = stages["server"]
    make_key, serve = (shlex.split(line) for line in runs)
    # Both have the volume that is the image's working directory.
    assert all("penstock:/var/lib/penstock" in line for line in (make_key, serve))
    entry = [*server.entry, *make_key[make_key.index("penstock") + 1 :]]
    secret = secret_in(server.run(shlex.join(entry), other_user=True).stdout)
    given = dict(each.split("=", 1) for each in serve if each.startswith("PENSTOCK_"))
    try_server(server, [*server.entry, *server.command], secret, **given)


def test_the_image_with_spark_has_what_its_jobs_import(stages: dict[str, Machine]) -> None:
    spark = stages["spark"]
    shown = spark.run(shlex.join([*spark.entry, *spark.command]), other_user=True).stdout
    assert "archive" in shown
    spark.run("python -c 'import deltalake, pandas, pyspark, penstock.spark.delta'")


def test_the_steps_for_systemd_lead_to_a_server(stages: dict[str, Machine], place: Path) -> None:
    (place / "systemd").mkdir()
    machine = Machine(place / "systemd")
    (wheel,) = (place / "build" / "root" / "wheels").iterdir()
    for origin, target in ((wheel, "checkout"), (DEPLOY / "systemd", "checkout/deploy/systemd")):
        copy(origin, machine.root / target)
    (machine.root / "etc" / "systemd" / "system").mkdir(parents=True)
    machine.cwd = Path("/checkout")
    lines = blocks("systemd")
    (extras,) = re.findall(r"whl(\[\S+\])'", lines[0])
    venv = machine.root / "opt" / "penstock"
    make_environment(venv, f"penstock{extras}")
    machine.put("python3", ":")
    group = USER if os.geteuid() == 0 else os.getgid()
    told = ""
    for line in lines:
        told += machine.run(re.sub(r"(-g|chgrp) penstock", rf"\1 {group}", line)).stdout
    # systemd makes it: StateDirectory.
    machine.run("useradd --home-dir /var/lib/penstock penstock")
    settings = machine.root / "etc" / "penstock" / "penstock.toml"
    settings.write_text(machine.here(settings.read_text()))
    # As the page says: a file that is changed is still one that the server may read.
    machine.run(lines[3].replace("keys add app", "keys add other"))
    unit = (machine.root / "etc" / "systemd" / "system" / "penstock.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    started = shlex.split(machine.here(command))
    try_server(machine, started, secret_in(told), PENSTOCK_OPS_ADDRESS="off")
