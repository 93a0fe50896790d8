"""The page about a store on S3 runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.docs.blocks import run_blocks

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "on-s3.md"


def test_the_page_runs(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_STORE", url)
    run_blocks(PAGE)
    assert "another broker has opened" in capsys.readouterr().out
