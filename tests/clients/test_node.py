"""npm's ``@aws-sdk/client-sqs`` and ``sqs-consumer``: their tests are in ``node/*.mjs``."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.clients import tools

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.clients.process import Served

pytestmark = pytest.mark.slow

NODE = Path(__file__).parent / "node"


def run(served: Served, script: str, place: Path, prefix: str) -> dict[str, int]:
    """Run the tests of a script; return how many there were, by outcome."""
    # Modules are looked for beside the script, so that one stands where they are installed.
    (place / "node_modules").symlink_to(tools.node_modules())
    shutil.copy(NODE / script, place)
    environment = {**served.environment, "QUEUE_PREFIX": prefix}
    if served.token:
        environment["SIGNED"] = "1"
    done = subprocess.run(
        [tools.node(), "--test", "--test-force-exit", "--test-reporter", "tap", script],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        name: int(count)
        for name, count in re.findall(r"^# (pass|fail|skipped) (\d+)$", done.stdout, re.MULTILINE)
    }


def written(script: str) -> int:
    """Count the tests of a script, so that none is lost on the way."""
    return (NODE / script).read_text().count('\ntest("')


@pytest.mark.parametrize("script", ["sdk.mjs", "consumer.mjs"])
def test_with_signatures(served: Served, script: str, tmp_path: Path, name: str) -> None:
    assert run(served, script, tmp_path, name) == {
        "pass": written(script),
        "fail": 0,
        "skipped": 0,
    }


def test_without_keys(serve: Callable[..., Served], tmp_path: Path, name: str) -> None:
    outcome = run(serve(), "sdk.mjs", tmp_path, name)
    assert outcome == {"pass": written("sdk.mjs") - 1, "fail": 0, "skipped": 1}
