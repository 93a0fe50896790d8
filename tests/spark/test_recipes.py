"""The page of recipes runs, over a store with a history."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.docs.blocks import run_blocks

import penstock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "spark-recipes.md"
TENANTS = ("acme", "bolt")


def publish(broker: penstock.Broker, count: int) -> None:
    messages = [
        penstock.Message(
            b"%d" % number,
            {"queue": "orders", "kind": "map" if number % 3 else "book", "price": number},
            group=TENANTS[number % 2],
        )
        for number in range(count)
    ]
    broker.publish(messages)


def work(broker: penstock.Broker) -> None:
    """Settle 24 of 30 messages; of the other six, three fail and three wait."""
    settled = broker.claim("orders", limit=24, consumer="one")
    broker.ack([each.receipt for each in settled])
    failing = broker.claim("orders", limit=3, consumer="two")
    reasons = ("the shop timed out", "the shop timed out", "no such product")
    for delivery, reason in zip(failing, reasons, strict=True):
        broker.release([delivery.receipt], reason=reason)


def test_the_recipes_run(
    spark: SparkSession,
    world: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broker: penstock.Broker = world.broker
    broker.create_queue("orders", max_attempts=1)
    publish(broker, 30)
    while penstock.route_once(broker):
        pass
    work(broker)
    broker.create_queue("books", filter="kind = 'book'")
    publish(broker, 5)
    monkeypatch.setenv("PENSTOCK_FLIGHT", world.location)
    monkeypatch.setenv("ARCHIVE", str(tmp_path / "archive"))

    left = run_blocks(PAGE)

    shown = capsys.readouterr().out.replace(" ", "")
    for row in (
        r"\|orders\|available\|3\|",
        r"\|book\|8\|84\.0\|",
        r"\|map\|16\|192\.0\|",
        r"\|acme\|1\|two\|\d+\|released\|theshoptimedout\|",
        r"\|orders\|bolt\|14\|\d+\|",
        r"\|orders\|theshoptimedout\|2\|",
        r"\n2\n10of30\n24done,0oftheminthestore\n0messagesarestill",
    ):
        assert re.search(row, shown), row
    assert left["filled"].added == 10
    assert left["again"].redriven == 2
    assert left["moved"].rows["done"] == 24
    assert left["everything"].count() == 24
    # Three that wait, two that were redriven, and five that the last recipe has routed.
    assert broker.stats("orders").available == 3 + 2 + 5
    assert broker.stats("books").available == 10 + 2
    assert spark.read.parquet(str(tmp_path / "archive-export")).count() == 24
