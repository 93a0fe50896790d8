"""What a database must be like to be opened, and what it is like after."""

from __future__ import annotations

import re
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import penstock
from penstock import (
    InvalidUrl,
    ManualClock,
    PenstockError,
    ServerUnreachable,
    StorageFailed,
    StoreDamaged,
)
from penstock import StoreMismatch as Mismatch
from penstock.store.sql import database
from penstock.store.sql.database import parse_statements, statements_of
from penstock.store.sql.location import TUNED, Tunables
from penstock.store.sql.store import SqlStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sql.postgres import PostgresServer

SOURCE = Path(database.__file__).parent


def described(
    server: PostgresServer, database: str, place: str = "penstock"
) -> dict[str, list[str]]:
    """Describe every column, index and constraint of the schema."""
    queries = {
        "columns": "SELECT table_name, column_name, data_type, is_nullable, column_default "
        f"FROM information_schema.columns WHERE table_schema = '{place}'",
        "indexes": f"SELECT indexdef FROM pg_indexes WHERE schemaname = '{place}'",
        "constraints": "SELECT conrelid::regclass::text, pg_get_constraintdef(oid) "
        f"FROM pg_constraint WHERE connamespace = '{place}'::regnamespace",
    }
    with server.connect(database) as connection:
        connection.execute(f"SET search_path = {place}")
        return {
            name: sorted(map(str, connection.execute(query).fetchall()))
            for name, query in queries.items()
        }


# --- the schema -----------------------------------------------------------------------------------


def test_the_tables_are_those_of_the_file(postgres: PostgresServer) -> None:
    opened, whole = postgres.create(), postgres.create()
    penstock.open(postgres.url(opened), background=False).close()
    with postgres.connect(whole) as connection:
        connection.execute("CREATE SCHEMA penstock")
        connection.execute("SET search_path = penstock")
        connection.execute((SOURCE / "schema.sql").read_text())
    expected = described(postgres, whole)
    assert len(expected["columns"]) > 80
    assert described(postgres, opened) == expected


def test_opening_again_changes_nothing(postgres: PostgresServer, url: str) -> None:
    with penstock.open(url, background=False) as broker:
        store_id = broker.info().store_id
    with penstock.open(url, background=False) as broker:
        assert broker.info().store_id == store_id
        assert broker.info().design == "sql"


def test_many_processes_may_open_a_new_store_at_once(url: str) -> None:
    found: list[str] = []

    def begin() -> None:
        with penstock.open(url, background=False) as broker:
            found.append(broker.info().store_id)

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    assert len(set(found)) == 1


@pytest.mark.parametrize("version", [0, 1, 99])
def test_another_version_is_refused(postgres: PostgresServer, url: str, version: int) -> None:
    penstock.open(url, background=False).close()
    with postgres.connect(url.rpartition("/")[2]) as connection:
        connection.execute(f"UPDATE penstock.schema_version SET version = {version}")
    before = described(postgres, url.rpartition("/")[2])
    for create in (True, False):
        with pytest.raises(Mismatch, match=f"has version {version};.*reads version 2: use the"):
            penstock.open(url, create=create)
    assert described(postgres, url.rpartition("/")[2]) == before


def test_tables_of_somebody_else_are_left_alone(postgres: PostgresServer, url: str) -> None:
    name = url.rpartition("/")[2]
    with postgres.connect(name) as connection:
        connection.execute("CREATE SCHEMA penstock; CREATE TABLE penstock.orders (n integer)")
        connection.execute("CREATE TABLE public.orders (n integer)")
    with pytest.raises(Mismatch, match="orders"):
        penstock.open(url)
    with postgres.connect(name) as connection:
        tables = connection.execute(
            "SELECT schemaname, tablename FROM pg_tables WHERE tablename = 'orders'"
        ).fetchall()
        assert len(tables) == 2
    with penstock.open(f"{url}?schema=other", background=False) as broker:
        broker.create_queue("q")


def test_tables_that_look_like_ours_are_refused(postgres: PostgresServer, url: str) -> None:
    with postgres.connect(url.rpartition("/")[2]) as connection:
        connection.execute("CREATE SCHEMA penstock; SET search_path = penstock")
        connection.execute("CREATE TABLE instance (n int); CREATE TABLE log_heads (n int)")
        connection.execute("CREATE TABLE schema_version (version text)")
        connection.execute("INSERT INTO schema_version VALUES ('init')")
    with pytest.raises(Mismatch, match="has version init"):
        penstock.open(url)


def test_a_store_keeps_to_its_routing(url: str) -> None:
    penstock.open(url, routing="pipeline", background=False).close()
    with pytest.raises(Mismatch, match="pipeline"):
        penstock.open(url, routing="inline")


# --- parts that are missing -----------------------------------------------------------------------

LOSSES = {
    "a table": ("DROP TABLE penstock.items", "lacks items"),
    "the version": ("DROP TABLE penstock.schema_version", "lacks schema_version"),
    "the row of the version": (
        "DELETE FROM penstock.schema_version",
        "lacks the row of schema_version",
    ),
    "the heads": ("DROP TABLE penstock.log_heads", "lacks log_heads"),
    "the ids": ("DROP SEQUENCE penstock.message_ids", "lacks message_ids"),
    "a column": ("ALTER TABLE penstock.ended DROP COLUMN attempts", r"lacks ended\.attempts"),
    "another column": (
        "ALTER TABLE penstock.log_cursors DROP COLUMN unrouted",
        r"lacks log_cursors\.unrouted",
    ),
    "an index": ("DROP INDEX penstock.items_lanes", "lacks index items_lanes"),
    "the row of the store": ("DELETE FROM penstock.instance", "instance .*lost a row"),
    "the heads' rows": ("DELETE FROM penstock.log_heads", "log_heads .*lost a row"),
    "a head": ("DELETE FROM penstock.log_heads WHERE log = 3", "log_heads .*lost a row"),
    "all but one": (
        (
            "DO $$ DECLARE t text; BEGIN FOR t IN SELECT tablename FROM pg_tables "
            "WHERE schemaname = 'penstock' AND tablename <> 'messages' "
            "LOOP EXECUTE 'DROP TABLE penstock.' || t; END LOOP; END $$"
        ),
        "lacks schema_version",
    ),
}


@pytest.fixture(scope="module")
def one_database(postgres: PostgresServer) -> Iterator[str]:
    name = postgres.create()
    yield name
    postgres.drop(name)


@pytest.mark.parametrize("what", LOSSES)
def test_a_store_that_lacks_a_part_is_refused_and_left_alone(
    postgres: PostgresServer, one_database: str, what: str
) -> None:
    place = f"lost_{list(LOSSES).index(what)}"
    loss, said = LOSSES[what]
    url = f"{postgres.url(one_database)}?schema={place}"
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q")
        broker.send("q", b"x")
    with postgres.connect(one_database) as connection:
        connection.execute(loss.replace("penstock", place))
    before = described(postgres, one_database, place)
    for _ in range(2):
        with pytest.raises(StoreDamaged, match=said) as refused:
            penstock.open(url)
        assert "nothing was changed" in str(refused.value)
        assert "backup" in str(refused.value)
    with pytest.raises(StoreDamaged, match=said):
        penstock.open(url, create=False)
    assert described(postgres, one_database, place) == before


# --- bad places -----------------------------------------------------------------------------------


def test_a_user_that_may_not_make_tables(postgres: PostgresServer, url: str) -> None:
    name = url.rpartition("/")[2]
    with postgres.connect() as admin:
        admin.execute("DROP ROLE IF EXISTS guest")
        admin.execute("CREATE ROLE guest LOGIN")
    with pytest.raises(StorageFailed, match="does not allow"):
        penstock.open(postgres.url(name, "guest"))
    with postgres.connect(name) as connection:
        found = connection.execute(
            "SELECT 1 FROM pg_namespace WHERE nspname = 'penstock'"
        ).fetchall()
        assert found == []


@pytest.mark.parametrize("rights", ["", "USAGE, CREATE"])
def test_a_user_that_may_not_use_the_tables(
    postgres: PostgresServer, url: str, rights: str
) -> None:
    """They are there, though he does not see them: he is not told that they are missing."""
    penstock.open(url, background=False).close()
    name = url.rpartition("/")[2]
    with postgres.connect(name) as admin:
        admin.execute("DROP ROLE IF EXISTS visitor")
        admin.execute("CREATE ROLE visitor LOGIN")
        try:
            admin.execute(f"GRANT CREATE ON DATABASE {name} TO visitor")
            if rights:
                admin.execute(f"GRANT {rights} ON SCHEMA penstock TO visitor")
            with pytest.raises(StorageFailed, match="does not allow"):
                penstock.open(postgres.url(name, "visitor"))
        finally:
            admin.execute("DROP OWNED BY visitor; DROP ROLE visitor")


def test_a_database_that_is_only_read(postgres: PostgresServer, url: str) -> None:
    reading = f"{url}?options=-c%20default_transaction_read_only%3Don"
    with pytest.raises(StorageFailed, match="read-only"):
        penstock.open(reading)
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q")
    with penstock.open(reading, background=False) as broker:
        assert broker.stats("q").available == 0
        with pytest.raises(StorageFailed, match="read-only"):
            broker.send("q", b"")


def test_a_database_of_another_encoding(postgres: PostgresServer) -> None:
    """What users write goes in as bytes."""
    with postgres.connect() as admin:
        admin.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    text = "\u2603 \U0001f600\0"
    try:
        with penstock.open(postgres.url("latin"), background=False) as broker:
            broker.create_queue("q", description=text.replace("\0", ""), max_attempts=1)
            message = penstock.Message(
                text.encode(), {"queue": "q", "x": text}, group=text, dedup_id=text
            )
            assert broker.publish([message, message]) == [1, 1]
            (delivery,) = broker.claim("q", consumer=text)
            assert (delivery.payload, delivery.group) == (text.encode(), text)
            assert delivery.attributes["x"] == text
            broker.release([delivery.receipt], reason=text)
            (entry,) = broker.browse("q", state="failed")
            assert entry.reason == text
            (attempt,) = broker.attempts("q", 1)
            assert attempt.consumer == text
            assert broker.check().clean
    finally:
        postgres.drop("latin")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda url: url.replace("/test_", "/no_such_"), "does not exist"),
        (lambda url: url.replace("postgres@", "nobody_here@"), "does not exist"),
        (lambda url: f"{url}?nonsense=1", "nonsense"),
        (lambda url: f"{url}?ring_size=0", "ring_size"),
        (lambda url: f"{url}?ring_size=4097", "ring_size"),
        (lambda url: f"{url}?ring_size=many", "ring_size"),
        (lambda url: f"{url}?schema=pg_catalog", "schema"),
        (lambda url: f"{url}?schema=a-b", "schema"),
        (lambda url: f"{url}?connect_timeout=soon", "connect_timeout is 'soon'"),
        (lambda url: f"{url},{url}", "in one database.*store for each application"),
        (lambda url: f"{url};{url}", "in one database.*store for each application"),
        (lambda url: [url, url], "in one database.*store for each application"),
        (lambda url: f"{url}?cluster=0", "cluster"),
        (lambda _: "postgresql:", "postgresql://"),
        (lambda _: "cockroachdb:place", "cockroachdb://"),
    ],
)
def test_urls_that_name_no_store(url: str, change: object, said: str) -> None:
    assert callable(change)
    with pytest.raises(InvalidUrl, match=said):
        penstock.open(change(url))


def test_a_database_without_characters(postgres: PostgresServer, url: str) -> None:
    with postgres.connect() as admin:
        admin.execute(
            "CREATE DATABASE raw TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C' "
            "STRATEGY FILE_COPY"
        )
    for wrong in (postgres.url("raw"), f"{url}?client_encoding=SQL_ASCII"):
        with pytest.raises(Mismatch, match=r"SQL_ASCII.*ENCODING 'UTF8'"):
            penstock.open(wrong)
        with postgres.connect(wrong.partition("?")[0].rpartition("/")[2]) as admin:
            text = "SELECT 1 FROM pg_namespace WHERE nspname = 'penstock'"
            assert admin.execute(text).fetchall() == []
    postgres.drop("raw")


def test_nobody_answers() -> None:
    with pytest.raises(ServerUnreachable):
        penstock.open("postgresql://somebody:secret@127.0.0.1:1/db")


def test_a_password_is_not_told() -> None:
    with pytest.raises(PenstockError) as caught:
        penstock.open("postgresql://somebody:s3cret@127.0.0.1:1/db")
    assert "s3cret" not in str(caught.value)
    with pytest.raises(InvalidUrl) as refused:
        penstock.open("postgresql://u:s3cret@h/a,postgresql://u:s3cret@h/b")
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        # Characters that have another meaning in a URL, and what libpq says of them.
        *(f"postgresql://u:zeb{sign}quux@127.0.0.1:1/db" for sign in "%@/? :#\n"),
        "postgresql://u:zeb%00quux@127.0.0.1:1/db",
        "postgresql://:zebquux@127.0.0.1:1/db?schema=A-B",
        "postgresql:u:zebquux@h/db",
        "postgresql://h/db?password=zebquux,postgresql://h/db",
        "postgresql://h/db?password=zeb;quux&schema=A-B",
        "postgresql://h/db?password=zebquux;postgresql://h/db",
        "postgres://u:zebquux@h/db",
    ],
)
def test_no_part_of_a_password_is_told(url: str) -> None:
    with pytest.raises((InvalidUrl, ServerUnreachable)) as caught:
        penstock.open(url)
    told = "".join(traceback.format_exception(caught.value)[-1:])
    assert "zeb" not in told
    assert "quux" not in told


def test_what_this_store_does_not_do(url: str, tmp_path: Path) -> None:
    with (
        penstock.open(url, background=False) as broker,
        pytest.raises(PenstockError, match="backup"),
    ):
        broker.checkpoint(tmp_path / "copy")


def test_the_ring_is_bounded(url: str) -> None:
    with penstock.open(url, background=False, clock=ManualClock()) as broker:
        store = broker._store
        assert isinstance(store, SqlStore)
        for size in (0, -1, 4_097):
            with pytest.raises(penstock.InvalidInput, match="ring_size"):
                store.set_ring_size(size, 0)


def test_what_a_url_tunes(url: str) -> None:
    told = "?poll_ms=50&sequential=1&selection_max=4&ring_size=8"
    with penstock.open(url + told, background=False) as broker:
        store = broker._store
        assert isinstance(store, SqlStore)
        tunables = store.tunables
        assert (tunables.poll_ms, tunables.selection_max, tunables.peek_max) == (50, 4, 100)
        assert tunables.sequential is True
        assert store.ring_size == 8
    fields = set(Tunables.__struct_fields__)
    assert fields - set(TUNED) == {"ring_size", "trust_ms", "cool_ms"}
    for name, (least, most) in TUNED.items():
        assert least <= getattr(Tunables(), name) <= most
        for wrong in (least - 1, most + 1, "", "x", "٣"):
            with pytest.raises(InvalidUrl, match=f"{name} .*from {least} to {most}"):
                penstock.open(f"{url}?{name}={wrong}")


# --- statements -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["postgresql", "cockroachdb"])
def test_every_statement_is_described_and_used(dialect: str) -> None:
    code = "".join(path.read_text() for path in SOURCE.glob("*.py"))
    for name, statement in statements_of(dialect).items():
        assert statement.purpose, name
        used = f'"{name}"' in code or re.fullmatch(r"(trim_by|mend)_\w+", name)
        assert used, f"{name} is used by nobody"


def test_a_statement_of_one_dialect() -> None:
    text = "-- name: a\n-- what it is\nSELECT :x::int;\n"
    other = "-- name: b\n-- dialect: cockroachdb\n-- another\nSELECT 2;\n"
    (found,) = parse_statements(text + other, "postgresql").values()
    assert (found.text, found.purpose) == (b"SELECT $1::int", "what it is")
    both = parse_statements(text + other, "cockroachdb")
    assert both["a"] == found
    assert (both["b"].text, both["b"].purpose) == (b"SELECT 2", "another")
    with pytest.raises(ValueError, match="two statements"):
        parse_statements(text + text, "postgresql")


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", []):
        yield from nodes(part)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("find_idle", {"queue": -1, "zone": b"", "count": 1_000}),
        ("find_orphans", {"queue": -1, "message_id": 0, "count": 1_000}),
        ("collect_zones", {"queues": [1] * 100, "zones": [b"%d" % n for n in range(100)]}),
        ("next_due", {"queues": [1, 2]}),
        ("any_expired", {"queues": [1, 2], "now_ms": 5}),
        ("pending_dead_letters", {"queues": [1, 2]}),
        ("next_retention", {"queues": [1, 2]}),
    ],
)
def test_what_is_asked_all_the_time_does_not_read_everything(
    many: psycopg.Connection[Any], name: str, parameters: dict[str, Any]
) -> None:
    statement = statements_of("postgresql")[name]
    text = b"EXPLAIN (ANALYZE, FORMAT JSON) " + statement.text
    (row,) = psycopg.RawCursor(many).execute(text, statement.values(parameters)).fetchall()
    for node in nodes(row[0][0]["Plan"]):
        removed = sum(node.get(f"Rows Removed by {why}", 0) for why in ("Filter", "Index Recheck"))
        assert (node["Actual Rows"] + removed) * node["Actual Loops"] < 10_000, node


@pytest.fixture(scope="module")
def many(postgres: PostgresServer) -> Iterator[psycopg.Connection[Any]]:
    """Have much of everything, as a process of the store sees it."""
    name = postgres.create()
    with penstock.open(postgres.url(name), background=False) as broker:
        broker.create_queue("q", ordering="standard")
        broker.create_queue("r")
        store = broker._store
        assert isinstance(store, SqlStore)
        connection = store.database.connect()
        connection.execute(
            """
            INSERT INTO items SELECT 1, n, convert_to((n % 2000)::text, 'UTF8'), 255, 0, NULL, 0, 0,
                0, 0, NULL, 1, false, '' FROM generate_series(1, 20000) AS n;
            INSERT INTO items SELECT 2, n, convert_to((n % 2000)::text, 'UTF8'), 255, n, NULL, 0, 0,
                0, 0, NULL, 1, true, '' FROM generate_series(1, 20000) AS n;
            INSERT INTO pointer_index SELECT q, convert_to(n::text, 'UTF8'), 0, 0, NULL
                FROM generate_series(0, 1999) AS n, generate_series(1, 2) AS q;
            INSERT INTO ended SELECT 1, false, n, n, n, 1, '' FROM generate_series(1, 20000) AS n;
            INSERT INTO ended SELECT 1, true, n, n, n, 1, '' FROM generate_series(1, 20000) AS n;
            ANALYZE
            """
        )
        yield connection
    postgres.drop(name)
