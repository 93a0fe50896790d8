"""A store on SlateDB of which objects are missing does not open, and nothing is changed."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from tests.faults.store_under_test import Pristine, clock, contents_of, fingerprint, make, opened

import penstock
from penstock.engines.slatedb import objects
from penstock.errors import StoreDamaged
from penstock.readers import place_to_read
from penstock.salvage import salvage

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def pristine(tmp_path: Path) -> Pristine:
    return make("slatedb-buckets", tmp_path)


def first_of_log(pristine: Pristine) -> Path:
    """Return the first object of the log whose rows are in no file of rows."""
    (rows,) = (pristine.path / "compacted").iterdir()
    made = rows.stat().st_mtime_ns
    log = sorted((pristine.path / "wal").iterdir())
    return next(each for each in log if each.stat().st_mtime_ns > made)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("later", [0, 2])
def test_an_object_of_the_log_that_is_missing_or_empty(
    pristine: Pristine, tmp_path: Path, *, empty: bool, later: int
) -> None:
    log = sorted((pristine.path / "wal").iterdir())
    lost = log[log.index(first_of_log(pristine)) + later]
    lost.write_bytes(b"") if empty else lost.unlink()
    before = fingerprint(pristine.path)
    with pytest.raises(StoreDamaged, match="missing"):
        opened(pristine.url(pristine.path))
    with pytest.raises(StoreDamaged, match="missing"):
        penstock.open_reader(pristine.url(pristine.path))
    assert fingerprint(pristine.path) == before
    report = salvage(
        pristine.url(pristine.path), f"slatedb+file://{tmp_path / 'new'}", clock=clock()
    )
    assert any(each.file.startswith("wal/") for each in report.unreadable)


def test_manifests_that_are_all_missing(pristine: Pristine, tmp_path: Path) -> None:
    shutil.rmtree(pristine.path / "manifest")
    before = fingerprint(pristine.path)
    with pytest.raises(StoreDamaged, match="manifest/"):
        opened(pristine.url(pristine.path))
    with pytest.raises(StoreDamaged, match="none of its manifests is there"):
        salvage(pristine.url(pristine.path), f"slatedb+file://{tmp_path / 'new'}", clock=clock())
    assert fingerprint(pristine.path) == before


def test_a_store_that_is_whole_opens_again_and_again(pristine: Pristine) -> None:
    for _ in range(3):
        with opened(pristine.url(pristine.path)) as broker:
            assert contents_of(broker) == pristine.truth


def test_a_manifest_with_any_number_costs_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flipped bits may say that billions of objects are missing."""
    url = f"slatedb+file://{tmp_path}/store"
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q")
    wrong = SimpleNamespace(
        id=1, replay_after_wal_id=1 << 40, next_wal_sst_id=1 << 60, segments=[], l0=[], compacted=[]
    )
    monkeypatch.setattr(objects, "_read_manifest", lambda *_: wrong)
    with pytest.raises(StoreDamaged, match="objects are missing"):
        objects.check_objects(place_to_read(url))
