"""moto's own SQS tests pass, but for those that are listed with a reason."""

from __future__ import annotations

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.sqs import moto_suite


@pytest.mark.slow
def test_the_suite_of_moto(tmp_path: Path) -> None:
    if find_spec("moto") is None and not os.environ.get("CI"):
        pytest.skip("moto is not installed")
    try:
        moto_suite.fetched()
    except (subprocess.SubprocessError, OSError) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"moto's source distribution can't be fetched: {error}")
    outcomes = moto_suite.run_patiently(tmp_path / "report.xml")
    failed = {name for name, outcome in outcomes.items() if outcome == "failed"}
    assert failed == set(moto_suite.expected().fails)
    assert sum(outcome == "passed" for outcome in outcomes.values()) >= 144


def test_the_page_says_what_the_list_says() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "sqs.md").read_text()
    expected = moto_suite.expected()
    for name, reason in {**expected.not_run, **expected.fails}.items():
        assert f"| `{name}` | {reason} |" in page
