"""``penstock pipeline``: each command runs its job and says what came of it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

from click.testing import CliRunner

from penstock.cli.main import cli

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


@pytest.fixture(autouse=True)
def _settings(spark: SparkSession) -> Iterator[None]:
    """Keep the settings of the session that all tests share: the command sets its own."""
    name = "spark.sql.shuffle.partitions"
    before = spark.conf.get(name)
    yield
    spark.conf.set(name, str(before))


def run(location: str, *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(
        cli, ["pipeline", *arguments], env={"PENSTOCK_FLIGHT": location}, catch_exceptions=False
    )
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def test_route_status_and_backfill(
    spark: SparkSession, make_world: Callable[..., Any], tmp_path: Path
) -> None:
    world = make_world()
    world.broker.create_queue("all", filter="n >= 0")
    world.publish(30)
    before = json.loads(run(world.location, "status", "--json"))
    assert before["lag"] == {"0": 30}
    routed = run(world.location, "route", "--once", "--checkpoint", str(tmp_path / "c"))
    told = r"routed 30 messages in [\d.]+ s, [\d,]+/s: 30 matches; up to offset 31 of 31\n"
    assert re.fullmatch(told, routed)
    assert world.broker.stats("all").available == 30
    assert "routing pipeline" in run(world.location, "status")
    world.broker.create_queue("late", filter="n < 5")
    dry = run(world.location, "backfill", "late", "--dry-run")
    assert dry == "looked at 30 messages, 5 match\n"
    assert json.loads(run(world.location, "backfill", "late", "--json"))["added"] == 5


def test_publish_redrive_report_archive_and_collect(
    spark: SparkSession, shop: Any, tmp_path: Path
) -> None:
    (tmp_path / "new.csv").write_text("n;price\n1000;31\n1001;2\n")
    said = run(shop.location, "publish", str(tmp_path / "new.csv"), "--option", "sep=;",
               "--column", "attributes=struct(n, price)", "--column", "group='csv'")  # fmt: skip
    assert said == "published 2 rows\n"
    assert run(shop.location, "publish", "x.csv", "--column", "group", code=2)
    (tmp_path / "bad.csv").write_text("price\nabc\n")
    said = run(shop.location, "publish", str(tmp_path / "bad.csv"), "--column",
               "priority=CAST(price AS INT)", code=1)  # fmt: skip
    assert re.fullmatch(r"Error: the rows can't be read .*CAST_INVALID_INPUT.*\n", said)
    failed = shop.broker.stats("dear").failed
    said = run(shop.location, "redrive", "--queue", "dear", "--dry-run")
    assert "out of stock" in said
    assert said.endswith(f"{failed} selected, 0 redriven\n")
    assert "no queue" in run(shop.location, "redrive", "--queue", "never", code=1).lower()
    said = run(shop.location, "report", "--queue", "dear", "--save", str(tmp_path / "r"))
    assert "dear" in said
    assert (tmp_path / "r" / "report.html").exists()
    gone = json.loads(
        run(shop.location, "archive", str(tmp_path / "a"), "--state", "done", "--json")
    )
    assert gone["trimmed"] == gone["rows"]["done"] > 0
    assert shop.broker.stats("dear").failed == failed
    said = run(shop.location, "archive", str(tmp_path / "a"), "--state", "done", "--optimize",
               "--vacuum")  # fmt: skip
    assert re.fullmatch(
        r"archived 0 done, 0 attempts; trimmed 0 messages\n"
        r"joined files: \d+ of done, \d+ of attempts, to \d\n"
        r"removed files: 0 of done, 0 of attempts\n",
        said,
    ), said
    report = json.loads(run(shop.location, "report", "--archive", str(tmp_path / "a"), "--json"))
    assert sum(row["done"] for row in report["queues"]) == gone["trimmed"]
    assert run(shop.location, "collect") == "would free 0 payloads, 0 bytes\n"
