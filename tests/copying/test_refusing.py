"""Copies that are killed, that can't be made, or that go wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from tests.copying.places import KINDS, fill, show

import penstock
from penstock import Message, State
from penstock.cli.main import cli
from penstock.copying import copy
from penstock.errors import DiskFull, PenstockError, StoreDamaged, StoreMismatch
from penstock.store import transfer
from penstock.store.kv.load import KvLoader
from penstock.store.sql.load import SqlLoader
from penstock.store.transfer import CopyPage
from penstock.urls import open_engine, parse_url

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.copying.places import Places

ROOT = Path(__file__).parents[2]


def killed(source: str, target: str, step: str, count: int) -> None:
    command = [sys.executable, "-m", "tests.copying.child", source, target, step, str(count)]
    paths = f"{ROOT}{os.pathsep}{ROOT / 'src'}"
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False)
    assert ended.returncode == -signal.SIGKILL


def stop(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_copy_goes_on_where_it_was(places: Places, kind: str) -> None:
    other = "rocks-buckets" if kind == "sql" else "sql"
    source, target = places.make(other, "source"), places.make(kind, "target")
    with penstock.open(source, background=False) as broker:
        fill(broker)
        # This lease ends before the copy does, which goes on as of its beginning.
        broker.claim("late", limit=1, lease_ms=1_000)
    for step, count in (("copying", 1), ("copying", 9), ("copying", 25), ("verifying", 3)):
        killed(source, target, step, count)
        with pytest.raises(StoreMismatch, match="the same 'penstock copy' again goes on"):
            penstock.open(target, background=False)
    steps: list[str] = []
    report = copy(source, target, progress=lambda step, *_: steps.append(step))
    # Everything was there; the last call has only compared it.
    assert report.resumed
    assert steps.count("copying") == 1 < steps.count("verifying")
    with penstock.open(target, background=False, create=False) as broker:
        assert broker.check().violations == []
        shown = show(broker)
    with penstock.open(source, background=False, create=False) as broker:
        late = show(broker)["late"]
        assert late[1]["enqueued_total"] == shown["late"][1]["enqueued_total"]
        assert show(broker)["log"] == shown["log"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_a_source_that_has_changed_does_not_go_on(places: Places, kind: str) -> None:
    source, target = places.make(kind, "source"), places.make("rocks-indexed", "target")
    with penstock.open(source, background=False) as broker:
        fill(broker)
    with pytest.raises(KeyboardInterrupt):
        copy(source, target, progress=stop)
    with penstock.open(source, background=False) as broker:
        broker.ack([each.receipt for each in broker.claim("orders")])
    with pytest.raises(StoreMismatch, match="the source has changed since"):
        copy(source, target)


def test_a_target_of_another_source_is_refused(places: Places) -> None:
    target = places.make("rocks-indexed", "target")
    for name in ("one", "two"):
        with penstock.open(places.make("rocks-indexed", name), background=False) as broker:
            fill(broker)
    with pytest.raises(KeyboardInterrupt):
        copy(places.make("rocks-indexed", "one"), target, progress=stop)
    with pytest.raises(StoreMismatch, match="of a copy of another store"):
        copy(places.make("rocks-indexed", "two"), target)


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_is_not_copied_over(places: Places, kind: str) -> None:
    source, target = places.make("rocks-indexed", "source"), places.make(kind, "target")
    for url in (source, target):
        with penstock.open(url, background=False) as broker:
            fill(broker)
    with pytest.raises(StoreMismatch, match="holds a store already: name an empty place"):
        copy(source, target)
    with penstock.open(target, background=False, create=False) as broker:
        assert broker.check().violations == []
        assert broker.stats("orders").available


@pytest.mark.parametrize(
    ("source", "target", "says"),
    [
        ("rocksdb:x", "rocksdb:x?design=buckets", "the same store"),
        ("rocksdb:x", "penstock://127.0.0.1:8814", "let a server serve that"),
        ("rocksdb:x", "grpc://127.0.0.1:8815", "let a server serve that"),
        ("penstock://127.0.0.1:8814", "rocksdb:x", "grpc://HOST:8815"),
        ("memory:", "rocksdb:x", "keeps nothing"),
        ("rocksdb:x", "memory:?design=buckets", "keeps nothing"),
        ("rocksdb:absent", "rocksdb:y", "there is no store at absent"),
        ("nonsense", "rocksdb:y", "no store is named by"),
    ],
)
def test_what_can_not_be_copied_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, target: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PenstockError, match=says):
        copy(source, target)
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_a_process_has_open_is_not_read(places: Places) -> None:
    source, target = places.make("rocks-indexed", "source"), places.make("rocks-indexed", "target")
    with penstock.open(source, background=False), pytest.raises(PenstockError, match="open"):
        copy(source, target)


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[CopyPage], object]) -> None:
    """Have a store load other messages than it is given."""
    for kind in (KvLoader, SqlLoader):
        load = kind._load_messages

        def spoiled(loader: Any, *given: Any, load: Any = load) -> None:
            change(next(each for each in given if isinstance(each, CopyPage)))
            load(loader, *given)

        monkeypatch.setattr(kind, "_load_messages", spoiled)


@pytest.mark.parametrize("kind", ["rocks-indexed", "sql"])
@pytest.mark.parametrize(
    ("queue", "table", "state"),
    [("bad", "active", "available"), ("copies", "done", "done"), ("bad", "failed", "failed")],
)
def test_a_difference_is_found(
    places: Places,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    queue: str,
    table: str,
    state: str,
) -> None:
    source, target = places.make("rocks-buckets", "source"), places.make(kind, "target")
    with penstock.open(source, background=False) as broker:
        fill(broker)

    def change(page: CopyPage) -> None:
        if (page.queue, page.table) == (queue, table):
            page.messages[0].payload = page.messages[0].payload[:-1] + b"?"

    spoil(monkeypatch, change)
    with pytest.raises(StoreMismatch, match=f"differs from the source: queue {queue}, {state}: "):
        copy(source, target)
    with pytest.raises(StoreMismatch, match="has not come to its end"):
        penstock.open(target, background=False)


def test_a_message_that_was_not_loaded_is_found(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = places.make("rocks-indexed", "source"), places.make("rocks-buckets", "target")
    with penstock.open(source, background=False) as broker:
        fill(broker)
    spoil(monkeypatch, lambda page: page.queue == "lines" and page.messages.pop())
    ended = CliRunner().invoke(cli, ["copy", source, target])
    assert ended.exit_code == 1
    assert "queue lines, " in ended.output


def damage(url: str, table: str, value: bytes | None) -> None:
    """Spoil the first row of a table."""
    engine, _ = open_engine(parse_url(url), None, create=False)
    batch, rows = engine.batch(), engine.table(table).scan(b"", b"\xff" * 20, 1)
    if value is None:
        batch.delete(rows[0][0], engine.table(table).family)
    else:
        batch.put(rows[0][0], value, engine.table(table).family)
    engine.commit(batch)
    engine.sync()
    engine.close()


@pytest.mark.parametrize(
    ("table", "value"), [("payloads", None), ("available", b"?"), ("history", b"?")]
)
def test_a_damaged_source_is_not_taken_for_a_smaller_one(
    places: Places, table: str, value: bytes | None
) -> None:
    source, target = places.make("rocks-indexed", "source"), places.make("rocks-indexed", "target")
    with penstock.open(source, background=False) as broker:
        fill(broker)
    damage(source, table, value)
    with pytest.raises(StoreDamaged, match="penstock check"):
        copy(source, target)


def test_a_copy_to_a_full_disk_goes_on_when_there_is_room(places: Places) -> None:
    source, target = places.make("rocks-indexed", "source"), places.make("rocks-indexed", "target")
    with penstock.open(source, background=False) as broker:
        fill(broker)
    with pytest.raises(DiskFull):
        copy(source, f"{target}&min_free_bytes={1 << 60}")
    assert copy(source, target).resumed


def test_a_copy_holds_a_page_at_a_time(places: Places) -> None:
    source, target = places.make("rocks-indexed", "source"), places.make("rocks-buckets", "target")
    with penstock.open(source, background=False) as broker:
        broker.create_queue("q", filter="true")
        for _ in range(40):
            broker.publish([Message(bytes(1 << 20))])
        broker.publish([Message(b"small")] * 1_000)
    tracemalloc.start()
    try:
        report = copy(source, target)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.queues[0].messages[State.AVAILABLE] == 1_040
    # 40 MiB were copied; two stores are read in pages of 4 MiB.
    assert peak < 24 << 20


def test_pages_have_bounds(places: Places) -> None:
    source = places.make("rocks-indexed", "source")
    with penstock.open(source, background=False) as broker:
        broker.create_queue("q", filter="true", max_attempts=1_000, backoff_base_ms=0)
        broker.publish([Message(b"x" * (1 << 20)) for _ in range(9)])
        broker.publish([Message(b"", group=str(n % 7)) for n in range(1_200)])
        for _ in range(11):
            broker.release([each.receipt for each in broker.claim("q", limit=1_000)], delay_ms=0)
        with broker.view(stats=True) as pinned:
            pages = list(transfer.read_pages(pinned, transfer.read_start(pinned)))
    for page in pages:
        assert 0 < len(page) <= transfer.PAGE_MESSAGES
        payloads = sum(len(each.payload) for each in page.messages)
        assert payloads <= transfer.PAGE_BYTES or len(page) == 1
        assert sum(each.attempts for each in page.messages) <= transfer.PAGE_ATTEMPTS
    assert sum(len(page.messages) for page in pages) == 1_209


def test_the_command_says_what_it_does(places: Places) -> None:
    source, target = places.make("rocks-indexed", "source"), places.make("slate", "target")
    with penstock.open(source, background=False) as broker:
        fill(broker)
    ended = CliRunner().invoke(cli, ["copy", source, target])
    assert ended.exit_code == 0, ended.output
    assert "2 messages were in flight: each is delayed" in ended.output
    assert "counts and checksums agree" in ended.output
    assert "copying: " in ended.output
    again = CliRunner().invoke(cli, ["copy", source, target])
    assert again.exit_code == 1
    assert "name an empty place" in again.output
