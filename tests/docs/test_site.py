"""The documentation site builds without a warning, and loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# One process builds it for all tests.
pytestmark = pytest.mark.xdist_group("site")

ROOT = Path(__file__).parents[2]
# Elements that make a browser fetch something, with a foreign address.
FETCHES = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(?:https?:)?//[^\"]+\"")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("docs") / "site"
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        f"--site-dir={target}",
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    assert built.stderr == ""
    return target


def test_every_page_is_built(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    names = {page.with_name(page.name.replace("README.md", "index.md")) for page in pages}
    assert {name.with_suffix(".html") for name in names} <= {
        path.relative_to(site) for path in site.rglob("*.html")
    }


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not FETCHES.findall(page.read_text()), page.name


def test_the_reference_has_what_the_code_says(site: Path) -> None:
    assert "lease_deadline_ms" in (site / "reference" / "types.html").read_text()
    assert "--max-attempts" in (site / "reference" / "commands.html").read_text()
