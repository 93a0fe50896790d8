"""A check of a store of which a part can't be read: that is not the same as not being there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from tests.damaging import files_of, flip

import penstock
from penstock import Message
from penstock.cli.main import cli
from penstock.store.kv.check import Kind

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def damaged(tmp_path: Path) -> str:
    """Make a store with a payload block and an index block that can't be read."""
    url = f"rocksdb:{tmp_path / 'store'}"
    with penstock.open(url, background=False) as broker:
        broker.create_queue("jobs")
        broker.create_queue("other")
        broker.publish(Message(b"%d" % n + b"x" * 90, {"queue": "jobs"}) for n in range(2_000))
    for table in ("payloads", "visibility_index"):
        (file,) = files_of(tmp_path / "store")[table]
        flip(file, file.stat().st_size // 2, 100)
    return url


def test_what_cannot_be_read_is_named_and_nothing_is_taken_for_missing(damaged: str) -> None:
    with penstock.open(damaged, background=False) as broker:
        for repair in (False, True):
            report = broker.check(repair=repair)
            assert report.found == {Kind.UNREADABLE: 2}
            assert (report.ok, report.left, report.rounds) == (False, 2, 1)
            assert {each.table for each in report.violations} == {"payloads", "visibility_index"}
            for each in report.violations:
                assert not each.repaired
                assert "Corruption" in each.text
                assert each.key in each.text
        # What does not depend on it is checked all the same.
        assert report.checked["queues"] == 2 * len(["spec", "counters", "coverage"])
        assert report.checked["log"] > 2
        assert broker.store_stats().quarantined_total == 0


@pytest.mark.parametrize("options", [(), ("--repair",)])
def test_the_command_says_what_to_do(damaged: str, options: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, ["check", "--store", damaged, *options])
    assert result.exit_code == 1, result.output
    assert "unreadable" in result.output
    assert "A part of the store can't be read." in result.output
    assert ("nothing was repaired" in result.output) == bool(options)
    assert "penstock salvage STORE TARGET" in result.output
