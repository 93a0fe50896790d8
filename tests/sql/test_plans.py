"""Plans: every hot statement goes by its index, whatever the planner knows of the tables."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql

import penstock
from penstock import ManualClock, Message
from penstock.model import LeaseRequest
from penstock.store.codec.metadata import Metadata, encode_metadata
from penstock.store.sql.database import statements_of
from penstock.store.sql.store import SqlStore

if TYPE_CHECKING:
    from collections.abc import Iterator

ZONES = 20_000
# Rows that a statement of a few messages may read of one table, or leave aside.
FEW = 100
DOCS = Path(__file__).parents[2] / "docs" / "sql.md"
_FILL = """
INSERT INTO items
    SELECT q, n, convert_to((n % 20000)::text, 'UTF8'), CASE q WHEN 1 THEN 255 ELSE -1 END, 0, NULL,
           0, 0, 0, 0, NULL, 1, false, ''
    FROM generate_series(1000001, 1040000) AS n, generate_series(1, 2) AS q;
INSERT INTO pointer_index SELECT q, convert_to(n::text, 'UTF8'), 0, 0, NULL
    FROM generate_series(0, 19999) AS n, generate_series(1, 2) AS q;
INSERT INTO pointers SELECT q, 0, convert_to(n::text, 'UTF8'), 0, 0, NULL
    FROM generate_series(0, 19999) AS n, generate_series(1, 2) AS q;
INSERT INTO messages SELECT n, 2, {metadata}, 'x' FROM generate_series(1000001, 1040000) AS n;
INSERT INTO ended SELECT 1, false, n, n, n, 1, '' FROM generate_series(1, 20000) AS n;
INSERT INTO attempts SELECT 1, n, 1, '', 0, 0, 1, '', '' FROM generate_series(1, 20000) AS n;
"""
TABLES = ("items", "pointers", "pointer_index", "messages", "ended", "attempts", "queue_counts")


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", []):
        yield from nodes(part)


def documented() -> dict[str, set[str]]:
    """Return the table of docs/sql.md: the indexes of each hot statement."""
    rows = re.findall(r"^\| `(\w+)` \| (`\w+`(?:, `\w+`)*) \|$", DOCS.read_text(), re.MULTILINE)
    return {name: set(re.findall(r"\w+", indexes)) for name, indexes in rows}


@pytest.mark.parametrize("known", ["never analysed", "analysed while empty"])
def test_hot_statements_go_by_their_indexes(url: str, known: str) -> None:
    """With 20,000 vested pointers, which no statistics tell of."""
    found: dict[str, set[str]] = {}
    statements = statements_of("postgresql")
    with penstock.open(url, background=False, clock=ManualClock()) as broker:
        store = broker._store
        assert isinstance(store, SqlStore)
        run = store.database.run

        def explaining(name: str, /, **parameters: Any) -> Any:
            if name in documented() and not store.database._verb.in_transaction:
                with suppress(UndoneError), store.database.transaction():
                    store.database.execute("SET LOCAL plan_cache_mode = force_generic_plan")
                    text = b"EXPLAIN (ANALYZE, FORMAT JSON) " + statements[name].text
                    values = statements[name].values(parameters)
                    plan = store.database.execute(text, values)[0][0][0]["Plan"]
                    found.setdefault(name, set()).update(_indexes(name, plan))
                    raise UndoneError
            return run(name, **parameters)

        broker.create_queue("q")
        broker.create_queue("f", ordering="fifo", max_attempts=1)
        with psycopg.connect(url, autocommit=True) as one:
            one.execute("SET search_path = penstock")
            for table in TABLES:
                one.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = false)")
            if known == "analysed while empty":
                one.execute("VACUUM ANALYZE")
            metadata = encode_metadata(Metadata(0, "", 0, 1, 0, {}))
            one.execute(sql.SQL(_FILL).format(metadata=sql.Literal(metadata)))
        store.database.run = explaining  # type: ignore[method-assign]
        clock = broker._clock
        assert isinstance(clock, ManualClock)
        for queue in ("q", "f"):
            broker.publish([Message(b"x", {"queue": queue}, group=f"{n}") for n in range(10)])
            taken = [d for _ in range(3) for d in broker.claim(queue, limit=5, lease_ms=60_000)]
            receipts = [d.receipt for d in taken]
            assert len(receipts) == 15
            broker.extend(receipts[:5], lease_ms=50_000)
            broker.extend(taken[-1].lease, lease_ms=50_000)
            broker.ack(receipts[:3])
            broker.ack(receipts[3:6])
            broker.release(receipts[6:11], delay_ms=0)
            clock.advance(100_000)
            broker.sweep()
        broker.publish([Message(b"x", {"queue": "q"})])
        broker.publish([Message(b"x", {"queue": "q"}, group="deep")] * 50)
        store._vested.clear()
        later = "UPDATE pointers SET vesting_ms = 4611686018427387904 WHERE zone <> 'deep'"
        store.database.execute(later)
        for _ in range(2):
            assert len(broker.claim("q", limit=5)) == 5
        wants = [LeaseRequest(2, 60_000, "", clock.lease_id()) for _ in range(2)]
        assert [len(each) for each in store.claim("q", wants, clock.now_ms())] == [2, 2]
    assert found == documented()


class UndoneError(Exception):
    """The transaction is to be undone."""


def _indexes(name: str, plan: dict[str, Any]) -> set[str]:
    """Check what a plan has read; return the indexes that it went by."""
    found = set()
    for node in nodes(plan):
        assert node["Node Type"] not in {"Seq Scan", "Hash Join", "Merge Join"}, (name, node)
        if node.get("Relation Name") in TABLES and "Scan" in node["Node Type"]:
            removed = sum(
                node.get(f"Rows Removed by {why}", 0) for why in ("Filter", "Index Recheck")
            )
            rows = (node["Actual Rows"] + removed) * node["Actual Loops"]
            assert rows <= FEW, (name, node)
            found.add(node["Index Name"])
    return found
