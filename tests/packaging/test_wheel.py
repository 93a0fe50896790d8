"""A wheel and a source distribution are built, and the wheel works in an empty environment."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

# One process builds it for all tests.
pytestmark = pytest.mark.xdist_group("wheel")

ROOT = Path(__file__).parents[2]
PACKAGES = ("penstock", "pyspark_penstock")
SITE_PAGE = "build/site/index.html"


def run(*command: str | Path, **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy with one page of documentation: that of the checkout may be old."""
    copy = tmp_path_factory.mktemp("checkout") / "penstock"
    leave_out = shutil.ignore_patterns(".*_cache", ".git", ".venv*", "__pycache__", "build", "dist")
    shutil.copytree(ROOT, copy, ignore=leave_out)
    (copy / "build" / "site").mkdir(parents=True)
    (copy / SITE_PAGE).write_text("<title>Penstock</title>")
    target = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", target, cwd=copy)
    return target


def sources() -> set[str]:
    """Return every file of the library, as paths below ``src/``."""
    files = (path for package in PACKAGES for path in (ROOT / "src" / package).rglob("*"))
    return {
        path.relative_to(ROOT / "src").as_posix()
        for path in files
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_every_file_of_the_library(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    library = {name for name in names if ".dist-info/" not in name}
    assert library == sources() | {"penstock/server/console/site/index.html"}


def test_the_source_distribution_holds_source_tests_and_docs(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {f"src/{name}" for name in sources()} <= names
    wanted = {"LICENSE", "Makefile", "README.md", "docs/index.md", "tests/test_tidy.py"}
    assert wanted <= names
    assert not [name for name in names if name.startswith((".venv", "build/"))]


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment with the wheel alone and, as nobody should need a compiler, wheels."""
    (wheel,) = built.glob("*.whl")
    place = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", place)
    quiet = ["--quiet", "--disable-pip-version-check"]
    install: list[str | Path] = [
        place / "bin/python",
        "-m",
        "pip",
        "install",
        *quiet,
        "--only-binary=:all:",
    ]
    run(*install, wheel, cwd=place)
    # Behind the check that the library itself needs no extra.
    run(place / "bin/python", "-c", "import penstock")
    run(*install, f"{wheel}[server]", cwd=place)
    return place / "bin"


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(environment: Path, tmp_path: Path) -> None:
    (example,) = re.findall(
        r"^## First example\n+```python\n(.*?)^```",
        (ROOT / "README.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    python, penstock = environment / "python", environment / "penstock"
    settings = {"PATH": "/usr/bin:/bin", "PENSTOCK_URL": "rocksdb:./data", "HOME": str(tmp_path)}
    said = run(python, "-W", "error", "-c", example, cwd=tmp_path, env=settings)
    assert "one book" in said
    run(penstock, "send", "orders", "a map", cwd=tmp_path, env=settings)
    assert "a map" in run(penstock, "claim", "orders", cwd=tmp_path, env=settings)


@pytest.mark.slow
def test_the_wheel_serves_a_console_with_the_documentation(
    environment: Path, tmp_path: Path
) -> None:
    command: list[str | Path] = [
        environment / "penstock",
        "up",
        "--json",
        "--native",
        "127.0.0.1:0",
    ]
    with subprocess.Popen(
        [*command, "--http", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as server:
        try:
            assert server.stdout is not None
            lines = iter(server.stdout.readline, "")
            told = json.loads("".join(takewhile(lambda line: line != "}\n", lines)) + "}")
            penstock = environment / "penstock"
            run(penstock, "create", "orders", "--url", told["native"], cwd=tmp_path)
            assert ">orders<" in page(f"{told['console']}/")
            assert "<title>Penstock</title>" in page(f"{told['console']}/console/docs/")
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0


def page(address: str) -> str:
    with urllib.request.urlopen(address, timeout=60) as answer:
        return str(answer.read().decode())
