"""Every file of a store, damaged in every way, under every verb that reads it.

The outcome is one of three: everything is there; a :class:`PenstockError`, and not one byte of the
store has changed; or, after a repair or a salvage, what could be read, and a report that says so.
The truth that outcomes are held to was read before the damage.

RocksDB's log may end with bytes that were being written when the machine stopped. In this store all
was confirmed and the engine has kept how much that is, so that no loss is allowed. Of SlateDB two
can't be told: the last object of its log, which may never have been written, and damage to its
newest manifest, which has no checksum (:func:`torn_off`).
"""

from __future__ import annotations

import contextlib
import random  # noqa: TID251 - one seed replays the sample
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from tests.damaging import files_of
from tests.faults.store_under_test import (
    KINDS,
    Contents,
    Pristine,
    clock,
    contents_of,
    fingerprint,
    make,
    opened,
)

from penstock.errors import PenstockError, StoreDamaged
from penstock.salvage import SalvageReport, open_source, salvage

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = 11
# Of each file, flipped bytes: so many in the whole matrix.
FLIPS = 12
# Cases of each kind of store in the sample.
SAMPLED = 10
# Files that say nothing of what is in the store: whatever becomes of them, all is there.
NO_CONTENTS = (
    *("LOG", "LOCK", "OPTIONS", "IDENTITY", "PENSTOCK", "CURRENT", "rocksdict", "compactions/"),
)


# Tables whose rows can't be told from others: payloads, and the names of queues.
IRREPLACEABLE = {None, "payloads", "queues"}


class Case(NamedTuple):
    """Damage to one file."""

    kind: str
    file: str
    damage: str
    at: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.file} {self.damage} {self.at}"

    def inflict(self, store: Path) -> None:
        """Damage a copy of the store."""
        file = store / self.file
        if self.damage == "removed":
            file.unlink()
            return
        data = bytearray(file.read_bytes())
        if self.damage == "flipped":
            data[self.at] ^= 0xFF
        file.write_bytes(data if self.damage == "flipped" else data[: self.at])


def cases_of(pristine: Pristine) -> Iterator[Case]:
    """Generate the matrix of a store."""
    rng = random.Random(f"{SEED} {pristine.kind}")
    for file in pristine.files():
        size = (pristine.path / file).stat().st_size
        yield Case(pristine.kind, file, "removed")
        if size:
            yield Case(pristine.kind, file, "emptied")
            for at in {size // 3, size // 2, size - 1} - {0}:
                yield Case(pristine.kind, file, "cut", at)
            # Where formats have their most: at both ends.
            near = [0, min(4, size - 1), size - 1, max(0, size - 30), max(0, size - 100)]
            for at in sorted({*near, *(rng.randrange(size) for _ in range(FLIPS - len(near)))}):
                yield Case(pristine.kind, file, "flipped", at)


# --- what may be missing --------------------------------------------------------------------------


def torn_off(case: Case, pristine: Pristine) -> bool:
    """Whether a case is damage that nothing tells of: to SlateDB's last object or manifest."""
    if not pristine.kind.startswith("slatedb"):
        return False
    logs = [file for file in pristine.files() if file.startswith("wal/")]
    return case.file == logs[-1] or unprotected(case, pristine)


def unprotected(case: Case, pristine: Pristine) -> bool:
    """Whether a case is damage to the newest manifest of SlateDB, which has no checksum."""
    manifests = [file for file in pristine.files() if file.startswith("manifest/")]
    return case.file in manifests[-1:]


def assert_nothing_invented(found: Contents, truth: Contents) -> None:
    """Every message was in its queue, with that payload."""
    for key, (_, payload, *_) in found.items():
        assert key in truth, f"{key} was never there"
        assert payload == truth[key][1], f"{key} has another payload"


# --- verbs ----------------------------------------------------------------------------------------


def table_of(file: Path) -> str | None:
    """Return the table of a file of rows of RocksDB."""
    tables = files_of(file.parent) if file.parent.name not in {"wal", "compacted"} else {}
    return next((table for table, files in tables.items() if file in files), None)


def rows_in(pristine: Pristine, store: Path) -> dict[str, dict[bytes, bytes]]:
    """Read every row that can be read, whatever the files are like."""
    with tempfile.TemporaryDirectory() as scratch:
        source = open_source(pristine.url(store), Path(scratch) / "scratch")
        with contextlib.closing(source):
            return {table: dict(source.rows(table)) for table in source.tables}


def try_reading(case: Case, pristine: Pristine, store: Path) -> bool:
    """Open, look, check; whether the store can be opened at all."""
    before = fingerprint(store)
    shutil.copytree(store, copy := store.with_name("before"))
    try:
        broker = opened(pristine.url(store))
    except PenstockError:
        if fingerprint(store) != before:
            # The engine had opened it, and has put its own files in order: no row has changed.
            assert rows_in(pristine, store) == rows_in(pristine, copy), "refused, and changed"
        return False
    refused = False
    with broker:
        found: Contents = {}
        try:
            found = contents_of(broker)
        except PenstockError:
            refused = True
        try:
            clean = broker.check().clean
        except PenstockError:
            refused = True
        if not refused and not torn_off(case, pristine):
            assert found == pristine.truth or not clean, "messages are missing without a word"
    return True


def try_claiming(case: Case, pristine: Pristine, store: Path) -> None:
    """Claim all there is: what comes is right, and if nothing is said it is all."""
    with opened(pristine.url(store)) as broker:
        for queue in ("jobs", "all"):
            waiting = {
                key: what[1]
                for key, what in pristine.truth.items()
                if key[0] == queue and what[0] == "available"
            }
            claimed: dict[tuple[str, int], bytes | None] = {}
            try:
                before = broker.stats(queue).in_flight
                while got := broker.claim(queue, limit=50, lease_ms=60_000):
                    claimed |= {(queue, each.message_id): each.payload for each in got}
            except PenstockError:
                with_error = True
            else:
                with_error = False
            for key, payload in claimed.items():
                assert pristine.truth[key][1] == payload
            if with_error:
                # A claim that failed has leased nothing.
                with contextlib.suppress(PenstockError):
                    assert broker.stats(queue).in_flight == before + len(claimed)
            elif claimed != waiting and not torn_off(case, pristine):
                with contextlib.suppress(PenstockError):
                    assert not broker.check().clean, "claims miss messages without a word"


def try_repairing(case: Case, pristine: Pristine, store: Path) -> None:
    """Repair: afterwards all that is there is right, and what is not there was reported."""
    try:
        with opened(pristine.url(store)) as broker:
            report = broker.check(repair=True)
    except PenstockError:
        return
    if not report.ok:
        return
    with opened(pristine.url(store)) as broker:
        found = contents_of(broker)
        assert broker.check().clean
    assert_nothing_invented(found, pristine.truth)
    if not report.found and not torn_off(case, pristine):
        assert found == pristine.truth, "a repair that found nothing, and messages are missing"


def try_salvaging(case: Case, pristine: Pristine, store: Path, target: Path) -> None:
    """Salvage: not one byte of the source changes, and the report is true."""
    before = fingerprint(store)
    try:
        report = salvage(pristine.url(store), f"rocksdb:{target}", clock=clock())
    except StoreDamaged:
        # Nothing can be made of it.
        assert not target.exists()
        assert case.file.endswith((".log", ".sst", ".manifest"))
        return
    finally:
        assert fingerprint(store) == before, "the source has changed"
    with opened(f"rocksdb:{target}") as broker:
        found = contents_of(broker)
        assert broker.check().clean
    assert_true(report, found, pristine.truth)
    if case.file.startswith(NO_CONTENTS):
        assert found == pristine.truth
    if case.file.endswith(".sst") and table_of(pristine.path / case.file) not in IRREPLACEABLE:
        assert set(found) == set(pristine.truth), "the payload is there and the message is not"
    if report.complete and not torn_off(case, pristine):
        assert found == pristine.truth, "complete, it says"


def assert_true(report: SalvageReport, found: Contents, truth: Contents) -> None:
    """Hold a report to what is there and what was."""
    known = {key: what for key, what in found.items() if not key[0].startswith("salvaged")}
    assert_nothing_invented(known, truth)
    for queue in report.queues:
        there = [what[0] for key, what in found.items() if key[0] == queue.name]
        assert queue.found == {state: there.count(state) for state in queue.found}
        for first, last in queue.lost:
            for message_id in range(first, last + 1):
                assert (queue.name, message_id) not in found
                assert queue.settings_lost or (queue.name, message_id) in truth
    missing = set(truth) - set(found)
    assert not missing or report.unreadable or report.repaired or report.notes


def run(case: Case, pristine: Pristine, place: Path) -> None:
    """Try every verb on a damaged store."""
    store = place / "store"
    shutil.copytree(pristine.path, store)
    case.inflict(store)
    try_salvaging(case, pristine, store, place / "salvaged")
    shutil.copytree(store, place / "claimed")
    shutil.copytree(store, place / "repaired")
    if try_reading(case, pristine, store):
        try_claiming(case, pristine, place / "claimed")
        try_repairing(case, pristine, place / "repaired")


# --- tests ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=sorted(KINDS))
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pristine:
    return make(request.param, tmp_path_factory.mktemp("pristine"))


def run_all(cases: list[Case], pristine: Pristine, place: Path) -> None:
    failed = []
    for number, case in enumerate(cases):
        where = place / str(number)
        where.mkdir()
        try:
            run(case, pristine, where)
        except Exception as error:
            failed.append(f"{case}: {type(error).__name__}: {str(error)[:300]}")
        shutil.rmtree(where)
    assert not failed, "\n".join(failed)


@pytest.mark.slow
def test_a_sample_of_the_matrix(pristine: Pristine, tmp_path: Path) -> None:
    cases = list(cases_of(pristine))
    step = len(cases) // SAMPLED
    run_all(cases[random.Random(SEED).randrange(step) :: step], pristine, tmp_path)


@pytest.mark.soak
def test_the_whole_matrix(pristine: Pristine, tmp_path: Path) -> None:
    run_all(list(cases_of(pristine)), pristine, tmp_path)
