"""The documentation site builds without a warning, and loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

# One process builds it for all tests.
pytestmark = pytest.mark.xdist_group("site")

ROOT = Path(__file__).parents[2]
# Elements that make a browser fetch something, with a foreign address.
FETCHES = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(?:https?:)?//[^\"]+\"")


def build(root: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Build a site as ``make docs`` does; not --quiet, which would make --strict mute."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", f"--site-dir={target}"],
        cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("docs") / "site"
    built = build(ROOT, target)
    assert built.returncode == 0, built.stderr
    return target


def test_a_broken_anchor_fails_a_build(tmp_path: Path) -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    checks = settings[settings.index("\nvalidation:") : settings.index("\nnav:")]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: test{checks}\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Here\n\n[there](#there)\n")
    assert build(tmp_path, tmp_path / "site").returncode == 1
    (tmp_path / "docs" / "index.md").write_text("# There\n\n[there](#there)\n")
    assert build(tmp_path, tmp_path / "site").returncode == 0


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


@pytest.mark.parametrize("path", [*(ROOT / "docs" / "images").glob("*.svg")], ids=lambda p: p.name)
def test_a_drawing_is_described_for_those_who_do_not_see_it(path: Path) -> None:
    drawing = ET.fromstring(path.read_text())
    names = {
        each: drawing.find(f"{{http://www.w3.org/2000/svg}}{each}") for each in ("title", "desc")
    }
    assert drawing.get("role") == "img"
    assert drawing.get("aria-labelledby") == "title desc"
    assert all(each is not None and each.get("id") == name for name, each in names.items())
    assert "href" not in path.read_text()
    # A page may be dark where the system is light: a drawing brings its own background.
    assert "prefers-color-scheme: dark" in path.read_text()
    assert 'rx="12" style="fill: var(--card)' in path.read_text()
