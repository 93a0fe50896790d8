"""Sessions: the user's settings count, whoever made them, and jobs bring their access along."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

import pyarrow as pa
import pyspark
from pyspark.errors import PySparkException

import penstock
from penstock.errors import InvalidInput
from penstock.flight.client import FlightStore
from penstock.flight.location import locate
from penstock.server import running
from penstock.server.keys import add_key
from penstock.spark import pipeline, session
from penstock.spark.jobs import collect, redrive
from penstock.spark.route import AVAILABLE_NOW, route, status
from penstock.spark.sessions import (
    DEFAULTS,
    _choose_python,
    _said,
    one_line,
    settings_for_query,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

SECONDS = 120
SOURCE = str(Path(penstock.__file__).parents[1])
NO_DATA = "spark.sql.streaming.noDataMicroBatches.enabled"
PROGRAM = """
import json, os, sys
from penstock.spark import session
spark = session()
names = sys.argv[1:]
print(json.dumps([spark.sparkContext.master, str(os.environ["PYSPARK_PYTHON"] == sys.executable),
                  *(spark.conf.get(name, None) for name in names)]))
"""


def test_settings_of_files_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        "# comment\n\nspark.master  local[3]\nspark.ui.enabled=true\n"
        "spark.driver.extraJavaOptions -Da=b -Dc=d\n"
    )
    more = tmp_path / "more"
    more.write_text("spark.sql.shuffle.partitions: 7\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setattr("pyspark.SparkContext._gateway", None)
    monkeypatch.delenv("MASTER", raising=False)
    arguments = f"--conf=spark.a=b=c --name mine --properties-file {more} pyspark-shell"
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", arguments)
    assert _said() == {
        "spark.master": "local[3]",
        "spark.ui.enabled": "true",
        "spark.driver.extraJavaOptions": "-Da=b -Dc=d",
        "spark.a": "b=c",
        "spark.app.name": "mine",
        "spark.sql.shuffle.partitions": "7",
    }
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--master local[1] pyspark-shell")
    assert _said()["spark.master"] == "local[1]"


def test_spark_submit_has_the_say(java: None, tmp_path: Path) -> None:
    """A session has the settings of a file and of arguments, and defaults for the rest."""
    (tmp_path / "spark-defaults.conf").write_text("spark.sql.session.timeZone Europe/Oslo\n")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    names = ["spark.sql.session.timeZone", "spark.sql.shuffle.partitions", NO_DATA]
    names.append("spark.sql.execution.arrow.maxRecordsPerBatch")
    settings = {
        "spark.sql.shuffle.partitions": "64",
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    }
    given = [part for pair in settings.items() for part in ("--conf", "=".join(pair))]
    environment = {**os.environ, "SPARK_CONF_DIR": str(tmp_path), "PYTHONPATH": SOURCE}
    environment.pop("PYSPARK_PYTHON", None)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [str(submit), "--master", "local[1]", *given, str(program), *names],
        capture_output=True, text=True, timeout=SECONDS, check=True, env=environment,
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1]) == [
        "local[1]",
        "True",
        "Europe/Oslo",
        "64",
        None,
        DEFAULTS["spark.sql.execution.arrow.maxRecordsPerBatch"],
    ]


def test_a_running_session_stays_as_it_is(spark: SparkSession) -> None:
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        before = spark.conf.getAll
        assert session("local[7]", name="another") is spark
        assert spark.conf.getAll == before
    finally:
        spark.conf.set("spark.sql.session.timeZone", DEFAULTS["spark.sql.session.timeZone"])


def test_settings_of_a_query_are_the_users_first(spark: SparkSession) -> None:
    other = "spark.sql.streaming.minBatchesToRetain"
    spark.conf.set(other, "33")
    try:
        with settings_for_query(spark, {other: "20", NO_DATA: "false"}):
            assert (spark.conf.get(other), spark.conf.get(NO_DATA)) == ("33", "false")
        assert (spark.conf.get(other), spark.conf.get(NO_DATA)) == ("33", "true")
    finally:
        spark.conf.unset(other)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Give the address of a broker that wants a key, and the key's token."""
    token = f"root:{add_key(tmp_path / 'keys.toml', 'root', ['all'])}"
    with (
        penstock.open("memory:", routing="pipeline") as broker,
        running(broker, flight="127.0.0.1:0", keys=tmp_path / "keys.toml") as server,
    ):
        broker.create_queue("q", filter="n >= 0", max_attempts=1)
        broker.publish(penstock.Message(b"", {"n": number}) for number in range(20))
        yield server.location("flight"), token


def test_the_token_goes_along(
    spark: SparkSession, guarded: tuple[str, str], tmp_path: Path
) -> None:
    """Executors have no token in their environment: driver and options bring it to them."""
    location, token = guarded
    reader = spark.read.format("penstock").options(server=location, table="active")
    with pytest.raises(Exception, match="it needs a key"):
        reader.load().count()
    assert reader.option("token", token).load().count() == 0
    settings = spark.conf.getAll
    query = route(
        location, spark=spark, checkpoint=tmp_path / "a", trigger=AVAILABLE_NOW, token=token
    )
    assert spark.conf.getAll == settings
    assert query.awaitTermination(SECONDS)
    assert reader.option("token", token).load().count() == 20
    FlightStore(location, token=token).publish(
        [pa.record_batch({"payload": [b"p"], "attributes_json": ['{"n": 1}']})],
    )
    started = pipeline(spark, location, token=token).transform(lambda log: log)
    query = started.start(checkpoint=tmp_path / "b", trigger=AVAILABLE_NOW)
    assert query.awaitTermination(SECONDS)
    assert status(location, token=token).behind == 0
    assert reader.option("token", token).load().count() == 21
    assert collect(spark, location, token=token).candidates == 0
    assert redrive(spark, location, "q", token=token, dry_run=True).selected == 0


def test_a_location_keeps_its_access(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pem = "-----BEGIN CERTIFICATE-----\n…\n"
    file = tmp_path / "ca.pem"
    file.write_text(pem)
    for ca in (file, pem):
        assert locate("grpc+tls://h:1", token="a:b", ca=ca).access[:2] == ("a:b", pem)
    plain = pickle.loads(pickle.dumps(locate("grpc+tls://h:1")))
    monkeypatch.setenv("PENSTOCK_TOKEN", "other:key")
    monkeypatch.setenv("PENSTOCK_CA", str(file))
    assert locate(plain).access == ("", "", "", "")
    assert locate("grpc+tls://h:1").access[:2] == ("other:key", pem)


# --- what goes wrong ------------------------------------------------------------------------------


def test_the_python_of_a_path_that_has_no_penstock_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    python = tmp_path / "python3"
    monkeypatch.setenv("PATH", str(tmp_path))
    for said, expected in (("1", None), ("None", sys.executable)):
        # Like the monkeypatch, it takes the variable away in the end.
        monkeypatch.setenv("PYSPARK_PYTHON", "")
        monkeypatch.delenv("PYSPARK_PYTHON")
        python.write_text(f"#!/bin/sh\necho {said}\n")
        python.chmod(0o755)
        _choose_python()
        assert os.environ.get("PYSPARK_PYTHON") == expected
    (record,) = caplog.records
    assert f"since {python} has no penstock: set PYSPARK_PYTHON" in record.getMessage()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidInput("two\n  lines"), "two lines"),
        (ValueError("bad"), "ValueError: bad"),
        (PySparkException("x penstock.errors.InvalidInput: no such\nstack"), "no such"),
        (PySparkException("[CAST_INVALID_INPUT] The value SQLSTATE: 22018\n== SQL =="),
         "[CAST_INVALID_INPUT] The value"),
        (PySparkException("An error occurred while calling o1.start.\n: java.io.IOException: gone\n"
                          "\tat java"), "java.io.IOException: gone"),
        (PySparkException("[STREAM_FAILED] Query [id = a, runId = b] terminated with exception: "
                          "py4j.Py4JException\nTraceback (most recent call last):\n  File\n"
                          "shop.errors.ShopError: no stock\n\tat java"), "ShopError: no stock"),
        (PySparkException("org.apache.SparkException: Exception thrown in awaitResult:\n\tat\n"
                          "Caused by: java.io.IOException: Stream closed\n"),
         "java.io.IOException: Stream closed"),
        (PySparkException("[STREAM_FAILED] Query [id = a, runId = b] terminated with exception: \n"
                          "=== Streaming Query ===\n"),
         "Spark gives no reason (PySparkException)"),
    ],
)  # fmt: skip
def test_an_error_is_told_in_one_line(error: Exception, expected: str) -> None:
    assert one_line(error) == expected
