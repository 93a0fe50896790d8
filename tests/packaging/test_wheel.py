"""A wheel and a source distribution are built, and the wheel works in an empty environment."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

# One process builds it for all tests.
pytestmark = pytest.mark.xdist_group("wheel")

ROOT = Path(__file__).parents[2]
PACKAGES = ("penstock", "pyspark_penstock")


def run(*command: str | Path, **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", target, cwd=ROOT)
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
    assert {name for name in names if ".dist-info/" not in name} == sources()


def test_the_source_distribution_holds_source_tests_and_docs(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {f"src/{name}" for name in sources()} <= names
    wanted = {"LICENSE", "Makefile", "README.md", "docs/index.md", "tests/test_tidy.py"}
    assert wanted <= names
    assert not [name for name in names if name.startswith((".venv", "build/"))]


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python, penstock = tmp_path / "venv/bin/python", tmp_path / "venv/bin/penstock"
    # Wheels only: nobody should need a compiler.
    quiet = ["--quiet", "--disable-pip-version-check"]
    run(python, "-m", "pip", "install", *quiet, "--only-binary=:all:", wheel, cwd=tmp_path)
    (example,) = re.findall(
        r"^## First example\n+```python\n(.*?)^```",
        (ROOT / "README.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    environment = {"PATH": "/usr/bin:/bin", "PENSTOCK_STORE": "rocksdb:./data"}
    said = run(python, "-W", "error", "-c", example, cwd=tmp_path, env=environment)
    assert "one book" in said
    run(penstock, "send", "orders", "a map", cwd=tmp_path, env=environment)
    assert "a map" in run(penstock, "claim", "orders", cwd=tmp_path, env=environment)
