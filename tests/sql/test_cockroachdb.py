"""The dialect of CockroachDB, which was never run: its statements against what is documented."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

import penstock
from penstock.store.sql.database import statements_of
from penstock.store.sql.failures import Refused, translated

if TYPE_CHECKING:
    from tests.sql.postgres import PostgresServer

PAGE = Path(__file__).parents[2] / "docs" / "cockroachdb.md"
STATEMENTS = {name: each.text.decode() for name, each in statements_of("cockroachdb").items()}
# What it lacks, or means otherwise.
REFUSED = (
    r"\b\w+(send|recv)\(|\bctid\b|\bpg_\w+|::regclass",
    r"\bconcat\(",
    r"\b(LISTEN|NOTIFY|TABLESAMPLE|MERGE|DISCARD)\b",
    r"ON CONFLICT \(\(",
)


def test_a_store_there_is_opened_with_a_warning(
    postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = f"cockroachdb://root@127.0.0.1:{postgres.port}/nowhere"
    with pytest.raises(penstock.InvalidUrl):
        penstock.open(nowhere)
    assert "has not been run on CockroachDB" in caplog.text


def test_the_page_has_every_statement() -> None:
    table = PAGE.read_text().partition("## Constructs")[2].partition("\n## ")[0]
    cells = [row.rpartition(" | ")[2] for row in table.splitlines()]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == STATEMENTS.keys()


@pytest.mark.parametrize("construct", REFUSED)
def test_no_statement_has_what_it_lacks(construct: str) -> None:
    assert [name for name, text in STATEMENTS.items() if re.search(construct, text)] == []


def test_no_statement_changes_a_table_twice() -> None:
    """It refuses that unless a setting allows it."""
    change = re.compile(
        r"(?:INSERT INTO|DELETE FROM|(?<!FOR )(?<!DO )UPDATE(?! OF| SKIP| SET)) (\w+)"
    )
    for name, text in STATEMENTS.items():
        changed = change.findall(text)
        assert len(changed) == len(set(changed)), (name, changed)


def test_the_column_of_a_null_is_read_from_the_message() -> None:
    """A dedup id that another process has just published makes one; there is no field for it."""
    said = 'null value in column "message_id" violates not-null constraint'
    refused = translated(psycopg.errors.NotNullViolation(said))
    assert isinstance(refused, Refused)
    assert refused.constraint == "message_id"
