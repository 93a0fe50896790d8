"""SQL: tables and views of a broker in Spark's catalog."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

from pyspark.errors import AnalysisException

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


@pytest.fixture
def sql(
    spark: SparkSession, make_world: Callable[..., Any]
) -> Iterator[Callable[[str], list[tuple[Any, ...]]]]:
    """Give a way to run a statement, in which SERVER is the address of a broker."""
    world = make_world(routing="inline")
    world.broker.create_queue("books", filter="kind = 'book'")
    world.broker.publish([penstock.Message(b"1", {"kind": "book"}, group="g")])

    def run(statement: str) -> list[tuple[Any, ...]]:
        return list(map(tuple, spark.sql(statement.replace("SERVER", world.location)).collect()))

    yield run
    for _, table, temporary in run("SHOW TABLES"):
        run(f"DROP {'VIEW' if temporary else 'TABLE'} {table}")


def test_tables_of_the_catalog(sql: Callable[[str], list[tuple[Any, ...]]]) -> None:
    sql("CREATE TABLE waiting USING penstock OPTIONS (server 'SERVER', table 'active')")
    sql("CREATE TABLE shop USING penstock OPTIONS (server 'SERVER')")
    sql(
        "CREATE TABLE ids USING penstock OPTIONS "
        "(server 'SERVER', table 'active', queue 'books', columns 'message_id', where 'size > 0')"
    )
    sql("CREATE TEMPORARY VIEW logged USING penstock OPTIONS (location 'SERVER', table 'log')")
    assert sql("SELECT queue, `group`, attributes['kind'] FROM waiting") == [("books", "g", "book")]
    sql("""INSERT INTO shop (payload, attributes, `group`) VALUES
           ('2', '{"kind": "book"}', 'h'), ('3', '{"kind": "pen"}', NULL)""")
    sql("""INSERT INTO shop (payload, attributes)
           SELECT '4', to_json(named_struct('kind', 'book')) FROM waiting WHERE `group` = 'g'""")
    assert sorted(sql("SELECT `group` FROM waiting")) == [("",), ("g",), ("h",)]
    assert sorted(sql("SELECT * FROM ids")) == sorted(sql("SELECT message_id FROM waiting"))
    assert sql("SELECT count(*), max(offset) FROM logged") == [(4, 4)]
    described = {row[0]: row[1] for row in sql("DESCRIBE waiting")}
    assert (described["message_id"], described["lease_deadline"]) == ("bigint", "timestamp")
    ((column, _, comment),) = sql("DESCRIBE ids")
    assert column == "message_id"
    assert comment.startswith("columns 'message_id', queue 'books', server 'grpc://")
    assert comment.endswith("', table 'active', where 'size > 0'")
    ((plan,),) = sql("EXPLAIN SELECT queue FROM waiting WHERE message_id > 3")
    assert "BatchScan penstock[queue" in plan
    for statement, says in (
        ("SELECT * FROM shop", "only takes messages"),
        ("INSERT OVERWRITE shop (payload) VALUES ('5')", "can only be added"),
        ("INSERT INTO waiting SELECT * FROM waiting", "table 'active' can't be written"),
    ):
        with pytest.raises(AnalysisException, match=says):
            sql(statement)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("server 'SERVER', table 'nope'", "no table 'nope'; there are log, .*, stats$"),
        ("server 'SERVER', tabel 'done'", "unknown option 'tabel'"),
        ("server 'SERVER', table 'done', token 'a:b'", "a token has no place in a catalog"),
        ("table 'done'", "where is the broker"),
    ],
)
def test_a_wrong_statement_makes_no_table(
    sql: Callable[[str], list[tuple[Any, ...]]], spark: SparkSession, options: str, says: str
) -> None:
    with pytest.raises(AnalysisException, match=f"(?m){says}"):
        sql(f"CREATE TABLE wrong USING penstock OPTIONS ({options})")
    assert not spark.catalog.tableExists("wrong")
