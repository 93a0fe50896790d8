"""A store of format 2, whose history knew no first claims, is upgraded by opening.

``format_2.json`` has the rows of one of each design, as a version of Penstock that had that format
wrote them: 1 has failed after two attempts; 2 as well, and was redriven, moved to and fro, and is
in flight for the third time; 3 was tried once and waits; 4 to 7 are done; 8 is in flight for the
first time, 9 for the second. Times are in milliseconds after 1,700,000,000,000.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import penstock
from penstock import State
from penstock.clock import ManualClock
from penstock.copying import copy
from penstock.engines.places import place_at
from penstock.engines.slatedb.objects import peek
from penstock.readers import open_copy, open_reader, watch_owner
from penstock.salvage import salvage
from penstock.server.backup import create, restore, restore_backup, verify, verify_backup
from penstock.store.codec import opendata, records
from penstock.store.transfer import CopiedMessage
from penstock.testing.checking import assert_clean
from penstock.urls import open_engine, parse_url, slatedb_place

if TYPE_CHECKING:
    from penstock.engines import Engine

ROWS = msgspec.json.decode(Path(__file__).with_name("format_2.json").read_bytes())
RECEIPTS = {design: dict(tables.pop("receipts")) for design, tables in ROWS.items()}
EPOCH_MS = 1_700_000_000_000
NOW_MS = EPOCH_MS + 963
# Queue, state, and attempts; of those that have ended, when.
BEFORE = {
    1: ("q", "failed", 2, 214),
    2: ("q", "in_flight", 3, None),
    3: ("to", "available", 1, None),
    **dict.fromkeys((4, 5, 6), ("q", "done", 1, 535)),
    7: ("q", "done", 1, 642),
    8: ("q", "in_flight", 1, None),
    9: ("f", "in_flight", 2, None),
    10: ("f", "available", 0, None),
    11: ("f", "available", 0, None),
    12: ("q", "delayed", 0, None),
    13: ("q", "available", 0, None),
    14: ("q", "available", 0, None),
}
FIRST_CLAIMS = {2: 7, 3: 114, 8: 649, 9: 756}
ACKED = {**BEFORE, 2: ("q", "done", 3, 963), 8: ("q", "done", 1, 963), 9: ("f", "done", 2, 963)}

KINDS = {
    "rocks-indexed": "rocksdb:{path}/store?design=indexed",
    "rocks-buckets": "rocksdb:{path}/store?design=buckets",
    "slate-buckets": "slatedb+file://{path}/store?design=buckets&flush_ms=0",
}
# Opens the store at argv[1] and acks the other arguments, as far as the n-th step of the database.
CHILD = """
import os, signal, sys
import penstock
from penstock.clock import ManualClock
from penstock.engines.rocksdb import RocksEngine
from penstock.engines.slatedb import SlateEngine
engine = RocksEngine if sys.argv[1].startswith("rocksdb") else SlateEngine
left = int(sys.argv[2])
def step():
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
for name in ("commit", "sync"):
    def call(self, *args, work=getattr(engine, name)):
        step()
        work(self, *args)
        step()
    setattr(engine, name, call)
clock = ManualClock(int(sys.argv[3]))
with penstock.open(sys.argv[1], clock=clock, background=False) as broker:
    broker.ack(sys.argv[4:6])
    broker.ack(sys.argv[6:])
"""


def make(kind: str, path: Path) -> str:
    """Make a store of format 2, and return its URL."""
    url = KINDS[kind].format(path=path)
    design = kind.split("-")[1]
    engine, _ = open_engine(parse_url(url), None, create=True)
    with closing(engine):
        batch = engine.batch()
        for table, rows in ROWS[design].items():
            for key, value in rows:
                batch.put(bytes.fromhex(key), bytes.fromhex(value), engine.table(table).family)
        engine.commit(batch)
        engine.sync()
    return url


def format_of(engine: Engine) -> int:
    identity: dict[str, Any] = msgspec.msgpack.decode(engine.table("default").get(b"meta") or b"")
    found: int = identity["format"]
    return found


def look(broker: Any) -> tuple[dict[int, Any], dict[int, int]]:
    """Return each message as BEFORE has it, and the first claims that are known."""
    found, claims = {}, {}
    for queue in ("q", "to", "f"):
        for state in State:
            for each in broker.browse(queue, state=state, limit=100):
                ended = each.ended_at_ms and each.ended_at_ms - EPOCH_MS
                assert each.message_id not in found
                found[each.message_id] = (queue, state.value, each.attempts, ended)
                if each.first_claimed_ms is not None:
                    claims[each.message_id] = each.first_claimed_ms - EPOCH_MS
    return found, claims


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_of_format_2_goes_on(kind: str, tmp_path: Path) -> None:
    url, receipts = make(kind, tmp_path), RECEIPTS[kind.split("-")[1]]
    clock = ManualClock(NOW_MS)
    # Readers beside the owner, of which there may be several, leave it as it is.
    for _ in range(2):
        reading = (
            open_reader(url, clock=clock)
            if kind.startswith("slate")
            else open_copy(Path(parse_url(url).place), clock=clock)
        )
        with reading as reader:
            assert look(reader) == (BEFORE, FIRST_CLAIMS)
    with closing(open_engine(parse_url(url), None, create=False)[0]) as engine:
        assert format_of(engine) == 2
    with penstock.open(url, clock=clock, background=False) as broker:
        assert look(broker) == (BEFORE, FIRST_CLAIMS)
        assert_clean(broker)
        assert all(broker.ack([receipts[each] for each in ("2", "8", "9")]))
        assert look(broker) == (ACKED, FIRST_CLAIMS)
        # What had ended before has no first claim until it is tried again, and then its own.
        assert broker.redrive("q") == 1
        (again,) = broker.browse("q", state=State.AVAILABLE, limit=1, message_id=1)
        assert again.first_claimed_ms == EPOCH_MS + 7
    with penstock.open(url, clock=clock, background=False) as broker:
        after, claims = look(broker)
        assert after == {**ACKED, 1: ("q", "available", 2, None)}
        assert claims == {**FIRST_CLAIMS, 1: 7}
        assert_clean(broker)
    if kind.startswith("slate"):
        assert b"\xa6format\x03" in (peek(slatedb_place(parse_url(url)), "default", b"meta") or b"")


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        *(("rocks-indexed", step) for step in (1, 2, 3, 5, 6)),
        *(("rocks-buckets", step) for step in (4, 5, 99)),
        *(("slate-buckets", step) for step in (2, 6)),
    ],
)
def test_it_is_killed_while_it_is_upgraded(kind: str, step: int, tmp_path: Path) -> None:
    url, design = make(kind, tmp_path), kind.split("-")[1]
    receipts = [RECEIPTS[design][each] for each in ("2", "8", "9")]
    command = [sys.executable, "-c", CHILD, url, str(step), str(NOW_MS), *receipts]
    ended = subprocess.run(command, check=False).returncode
    assert ended == (0 if step == 99 else -signal.SIGKILL)
    with closing(open_engine(parse_url(url), None, create=False)[0]) as engine:
        prefix = opendata.DONE.prefix(b"q")
        done = engine.table("history").scan(prefix, prefix + b"\xff" * 20, 100)
        parts = [records.decode_ended(value, failed=False) for _, value in done]
        known = [each for part in parts for each in part if each.first_claimed_ms is not None]
        # A version that reads format 2 alone meets no record that it can't read.
        assert format_of(engine) == 3 or not known
    with penstock.open(url, clock=ManualClock(NOW_MS), background=False) as broker:
        found, claims = look(broker)
        assert claims == FIRST_CLAIMS
        acked = {id_ for id_ in (2, 8, 9) if found[id_] == ACKED[id_]}
        assert acked in ({2, 8}, {2, 8, 9}) if step > 8 else acked in (set(), {2, 8})
        assert found == {**BEFORE, **{id_: ACKED[id_] for id_ in acked}}
        # An ack that was done is not done again, and the others still can be.
        assert sum(map(bool, broker.ack(receipts))) == 3 - len(acked)
        assert look(broker) == (ACKED, FIRST_CLAIMS)
        assert_clean(broker)


def test_a_store_of_format_2_is_read_while_its_owner_upgrades_it(tmp_path: Path) -> None:
    url, clock = make("slate-buckets", tmp_path), ManualClock(NOW_MS)
    receipts = [RECEIPTS["buckets"][each] for each in ("2", "8", "9")]
    # A standby looks at the store before it waits for its owner.
    watch_owner(url)
    with (
        open_reader(url, clock=clock) as before,
        penstock.open(url, clock=clock, background=False) as owner,
        open_reader(url, clock=clock) as between,
    ):
        assert all(owner.ack(receipts))
        owner.close()
        with open_reader(url, clock=clock) as after:
            assert look(after) == (ACKED, FIRST_CLAIMS)
        assert look(between) == look(before) == (BEFORE, FIRST_CLAIMS)


@pytest.mark.parametrize("kind", ["rocks-indexed", "slate-buckets"])
def test_backups_and_salvage_of_format_2(kind: str, tmp_path: Path) -> None:
    url, clock = make(kind, tmp_path), ManualClock(NOW_MS)
    scheme = url.partition(":")[0]
    slashes = "//" if scheme.startswith("slate") else ""
    restored = f"{scheme}:{slashes}{tmp_path}/restored"
    # Backups by the version before have the same files as such a store.
    if kind.startswith("rocks"):
        assert verify(tmp_path / "store").ok
        restore(tmp_path / "store", tmp_path / "restored")
    else:
        place = place_at(str(tmp_path / "backups"))
        create(place, url.partition("?")[0])
        verify_backup(place, None)
        restore_backup(place, None, restored)
    salvaged = f"{scheme}:{slashes}{tmp_path}/salvaged"
    salvage(url.partition("?")[0], salvaged, clock=clock)
    for each in (restored, salvaged):
        with penstock.open(each, clock=clock, background=False) as broker:
            assert look(broker) == (BEFORE, FIRST_CLAIMS)
            assert_clean(broker)
        with closing(open_engine(parse_url(each), None, create=False)[0]) as engine:
            assert format_of(engine) == 3


def test_a_store_of_format_2_is_copied(tmp_path: Path) -> None:
    source, target = make("rocks-indexed", tmp_path), f"rocksdb:{tmp_path}/copy?design=buckets"
    copy(source, target, clock=ManualClock(NOW_MS))
    with penstock.open(target, clock=ManualClock(NOW_MS), background=False) as broker:
        found, claims = look(broker)
        assert found.keys() == BEFORE.keys()
        # The attempts that came along tell all of them.
        assert claims == {**FIRST_CLAIMS, 1: 7, **dict.fromkeys((4, 5, 6), 435), 7: 542}
        assert_clean(broker)
    with closing(open_engine(parse_url(source), None, create=False)[0]) as engine:
        assert format_of(engine) == 2


def test_a_page_of_a_server_of_the_version_before_is_loaded() -> None:
    record = records.AttemptRecord(5, "w", 7, 1, "")
    sent = (1, b"metadata", 2, 0, 9, "", b"payload", [(1, record), (2, record)])
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=CopiedMessage)
    assert found.first_claimed_ms == 5
    # And it takes one of this version, without the last field.
    assert tuple(msgspec.msgpack.decode(msgspec.msgpack.encode(found)))[:-1] == tuple(
        msgspec.msgpack.decode(msgspec.msgpack.encode(sent))
    )
