"""Salvage: a new store with all that can be read of a damaged one, and a true report."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from tests.damaging import compact, files_of, flip
from tests.faults.store_under_test import (
    Contents,
    clock,
    contents_of,
    fingerprint,
    make,
    opened,
)

from penstock import Message, StoreLocked
from penstock.cli.main import cli
from penstock.errors import InvalidUrl, StoreDamaged
from penstock.salvage import SalvagedQueue, SalvageReport, salvage
from penstock.testing.checking import assert_clean
from penstock.urls import DESIGNS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A thousand messages to two queues, ten done, all in one file for each table."""
    path = tmp_path / "store"
    with opened(f"rocksdb:{path}") as broker:
        broker.create_queue("jobs")
        broker.create_queue("steps", ordering="fifo")
        for _ in range(10):
            broker.publish([Message(b"x" * 300, {"queue": "jobs"}) for _ in range(100)])
        broker.publish([Message(b"s", {"queue": "steps"}, group="g") for _ in range(10)])
        taken = broker.claim("jobs", limit=20, lease_ms=600_000)
        broker.ack([each.receipt for each in taken[:10]])
    compact(path, DESIGNS["indexed"])
    return path


def salvaged(
    store: Path, target: Path, *, drop_after: bool = False
) -> tuple[SalvageReport, Contents]:
    before = fingerprint(store)
    report = salvage(f"rocksdb:{store}", f"rocksdb:{target}", drop_after=drop_after, clock=clock())
    assert fingerprint(store) == before
    with opened(f"rocksdb:{target}") as broker:
        assert_clean(broker)
        return report, contents_of(broker)


def of(report: SalvageReport, name: str) -> SalvagedQueue:
    (found,) = (queue for queue in report.queues if queue.name == name)
    return found


def test_a_whole_store_is_copied_as_it_is(store: Path, tmp_path: Path) -> None:
    with opened(f"rocksdb:{store}") as broker:
        truth = contents_of(broker)
    report, found = salvaged(store, tmp_path / "new")
    assert report.complete
    assert found == truth
    assert of(report, "jobs").found["in_flight"] == 10


def test_messages_whose_payload_is_damaged_are_lost_by_id_and_no_others(
    store: Path, tmp_path: Path
) -> None:
    (file,) = files_of(store)["payloads"]
    flip(file, file.stat().st_size // 2)
    report, found = salvaged(store, tmp_path / "new")
    jobs = of(report, "jobs")
    ((first, last),) = jobs.lost
    assert jobs.expected == 1000
    assert sum(jobs.found.values()) == 1000 - (last - first + 1)
    assert {id_ for queue, id_ in found if queue == "jobs"} == {
        id_ for id_ in range(1, 1001) if not first <= id_ <= last
    }
    (unreadable,) = report.unreadable
    assert (unreadable.file, unreadable.table) == (file.name, "payloads")
    assert unreadable.between == f"message {first - 1} to message {last + 1}"


@pytest.mark.parametrize("table", ["available", "in_progress", "history", "visibility_index"])
def test_messages_whose_record_is_lost_come_back_by_the_log(
    store: Path, tmp_path: Path, table: str
) -> None:
    for file in files_of(store)[table]:
        file.unlink()
    report, found = salvaged(store, tmp_path / "new")
    assert {id_ for queue, id_ in found if queue == "jobs"} == set(range(1, 1001))
    assert of(report, "jobs").lost == []
    assert not report.complete
    if table != "history":
        assert [state for state, *_ in found.values()].count("done") == 10


def test_payloads_that_nothing_is_known_of_come_into_a_queue_of_their_own(
    store: Path, tmp_path: Path
) -> None:
    for table in ("available", "log"):
        for file in files_of(store)[table]:
            file.unlink()
    report, _ = salvaged(store, tmp_path / "new")
    assert of(report, "jobs").lost == [(21, 1000)]
    assert of(report, "salvaged").put_back == 990


def test_queues_whose_settings_are_lost_keep_their_messages(store: Path, tmp_path: Path) -> None:
    for file in files_of(store)["queues"]:
        file.unlink()
    report, _ = salvaged(store, tmp_path / "new")
    # The names are gone as well.
    assert {queue.name: sum(queue.found.values()) for queue in report.queues} == {
        "jobs": 10,
        "salvaged-1": 990,
        "salvaged-2": 10,
    }
    assert all(queue.settings_lost for queue in report.queues)
    with opened(f"rocksdb:{tmp_path / 'new'}") as broker:
        assert broker.queue("salvaged-2").ordering == "fifo"
        assert len(broker.claim("salvaged-1", limit=5)) == 5


def test_a_log_damaged_in_the_middle_is_read_behind_the_damage_or_up_to_it(tmp_path: Path) -> None:
    pristine = make("rocksdb-indexed", tmp_path)
    (log,) = pristine.path.glob("*.log")
    flip(log, log.stat().st_size // 4)
    report, found = salvaged(pristine.path, tmp_path / "all")
    dropped, before = salvaged(pristine.path, tmp_path / "before", drop_after=True)
    assert not report.complete
    assert not dropped.complete
    assert set(before) < set(found) <= set(pristine.truth)
    assert any(log.name == each.file and "behind it" in each.why for each in report.unreadable)


# --- refusals and the command ---------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["salvage", *arguments])
    return result.exit_code, result.output


def test_what_only_the_damaged_log_knew_is_not_called_nothing(tmp_path: Path) -> None:
    pristine = make("rocksdb-indexed", tmp_path)
    (log,) = pristine.path.glob("*.log")
    flip(log, log.stat().st_size // 4)
    code, output = run(f"rocksdb:{pristine.path}", f"rocksdb:{tmp_path / 'new'}", "--drop-after")
    assert code == 1
    assert "A part of the log is lost" in output


def test_the_command_says_what_is_lost_by_its_exit_code_and_in_words(
    store: Path, tmp_path: Path
) -> None:
    code, text = run(f"rocksdb:{store}", f"rocksdb:{tmp_path / 'whole'}")
    assert (code, text.splitlines()[-1]) == (0, "everything was there")
    (file,) = files_of(store)["payloads"]
    flip(file, file.stat().st_size // 2)
    code, text = run(f"rocksdb:{store}", f"rocksdb:{tmp_path / 'part'}")
    assert code == 1
    assert "jobs" in text
    assert file.name in text
    code, text = run(f"rocksdb:{store}", f"slatedb+file://{tmp_path / 'slate'}", "--json")
    assert code == 1
    report = json.loads(text)
    assert not report["complete"]
    assert report["queues"][0]["lost"]
    with opened(f"slatedb+file://{tmp_path / 'slate'}") as broker:
        assert_clean(broker)


def test_a_target_that_is_not_empty_is_refused(store: Path, tmp_path: Path) -> None:
    before = fingerprint(store)
    code, text = run(f"rocksdb:{store}", f"rocksdb:{store}")
    assert code == 2
    assert "is not empty" in text
    with pytest.raises(InvalidUrl, match="can't be salvaged to"):
        salvage(f"rocksdb:{store}", "memory:")
    assert fingerprint(store) == before


def test_what_is_not_there_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreDamaged, match="holds nothing of a RocksDB database"):
        salvage(f"rocksdb:{tmp_path / 'empty'}", f"rocksdb:{tmp_path / 'new'}")
    assert [each.name for each in tmp_path.iterdir()] == ["empty"]


def test_a_store_that_is_open_is_refused(store: Path, tmp_path: Path) -> None:
    with opened(f"rocksdb:{store}"), pytest.raises(StoreLocked):
        salvage(f"rocksdb:{store}", f"rocksdb:{tmp_path / 'new'}")


def test_a_log_that_its_disk_can_not_read_is_damage(tmp_path: Path) -> None:
    pristine = make("rocksdb-indexed", tmp_path)
    (log,) = pristine.path.glob("*.log")
    log.unlink()
    # A directory in its place: reading it is an error of the operating system.
    log.mkdir()
    report = salvage(f"rocksdb:{pristine.path}", f"rocksdb:{tmp_path / 'new'}", clock=clock())
    assert any(each.file == log.name for each in report.unreadable)
    with opened(f"rocksdb:{tmp_path / 'new'}") as broker:
        assert set(contents_of(broker)) < set(pristine.truth)
