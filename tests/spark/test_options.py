"""Options are checked before anything is asked of a broker."""

from __future__ import annotations

import re
from inspect import signature

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

from penstock.errors import InvalidInput
from penstock.flight.location import locate
from penstock.spark.jobs import archive, backfill, collect, publish, redrive, report
from penstock.spark.pipelines import pipeline
from penstock.spark.route import route
from penstock.spark.sessions import located, place_of
from penstock.spark.source import Options, read_options, write_options

PLACE = {"location": "grpc://127.0.0.1:1"}


def test_names_are_case_insensitive_and_values_typed() -> None:
    options = read_options(
        {
            **PLACE,
            "TABLE": "log",
            "startingOffsets": '{"0": 5, "1": -2}',
            "failondataloss": "FALSE",
            "maxOffsetsPerTrigger": "100",
            "columns": "log, offset",
            "minPartitions": "7",
        },
        streaming=True,
    )
    assert options == Options(
        location=locate("grpc://127.0.0.1:1"),
        table="log",
        starting={"0": 5, "1": -2},
        fail_on_data_loss=False,
        max_offsets=100,
        columns=("log", "offset"),
        partitions=7,
    )


def test_a_broker_has_two_names_for_its_address() -> None:
    for name in ("server", "location", "SERVER"):
        assert read_options({name: "grpc://h:1", "table": "log"}).location == "grpc://h:1"
    both = {"server": "grpc://h:1", "location": "grpc://h:2", "table": "log"}
    with pytest.raises(InvalidInput, match="name two brokers"):
        read_options(both)


def test_location_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_FLIGHT", "grpc://broker:8815")
    assert read_options({"table": "log"}).location == "grpc://broker:8815"
    monkeypatch.delenv("PENSTOCK_FLIGHT")
    with pytest.raises(InvalidInput, match="where is the broker"):
        read_options({"table": "log"})


@pytest.mark.parametrize(
    ("given", "streaming", "says"),
    [
        ({}, False, "'table' is missing"),
        ({"table": "logs"}, False, "no table 'logs'; there are log, messages"),
        ({"table": "matches"}, False, "no table 'matches'"),
        ({"table": "active"}, True, "can't be read as a stream; log, done, failed, attempts can"),
        ({"table": "done", "includeArchive": "x"}, True, "are for batch reads"),
        ({"table": "log", "startingOffset": "earliest"}, False, "unknown option 'startingoffset'"),
        ({"table": "done", "startingOffsets": "earliest"}, False, "are for the table 'log'"),
        ({"table": "log", "endingOffsets": "latest"}, True, "are for batch reads"),
        ({"table": "log", "maxOffsetsPerTrigger": "5"}, False, "are for streams"),
        ({"table": "log", "maxOffsetsPerTrigger": "0"}, True, "from 1 to"),
        ({"table": "log", "minOffsetsPerTrigger": "5"}, False, "are for streams"),
        (
            {"table": "log", "minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"},
            True,
            "minOffsetsPerTrigger is more than",
        ),
        ({"table": "log", "maxTriggerDelay": "soon"}, True, "a time like 15m"),
        ({"table": "log", "endingTimestamp": "5"}, True, "are for batch reads"),
        (
            {"table": "log", "endingTimestamp": "5", "endingOffsets": "latest"},
            False,
            "endingOffsets and endingTimestamp exclude",
        ),
        ({"table": "log", "startingTimestamp": '{"0": "noon"}'}, False, "with its zone"),
        ({"table": "log", "partitions": "many"}, False, "partitions is a number from 1 to 1024"),
        ({"table": "log", "startingOffsets": "first"}, False, "earliest', 'latest' or JSON"),
        ({"table": "log", "endingOffsets": "earliest"}, False, "endingOffsets is 'latest'"),
        ({"table": "log", "payload": "yes"}, False, "payload is true or false"),
        ({"table": "log", "columns": " , "}, False, "a list of names"),
        ({"table": "log", "startingTimestamp": "2026-01-31T12:00:00"}, False, "with its zone"),
        (
            {"table": "log", "startingTimestamp": "5", "startingOffsets": "latest"},
            False,
            "exclude each other",
        ),
        ({"table": "log", "stretches": "[[1]]"}, False, "stretches is JSON"),
    ],
)
def test_wrong_options_say_what_is_right(given: dict[str, str], streaming: bool, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        read_options({**PLACE, **given}, streaming=streaming)


def test_times_are_milliseconds() -> None:
    for text in ("1769860800000", "2026-01-31T12:00:00Z", "2026-01-31T13:00:00+01:00"):
        options = read_options({**PLACE, "table": "log", "startingTimestamp": text})
        assert options.starting_ms == 1_769_860_800_000


def test_only_messages_can_be_written() -> None:
    assert write_options(PLACE).table == "messages"
    with pytest.raises(InvalidInput, match="can't be written"):
        write_options({**PLACE, "table": "queues"})
    with pytest.raises(InvalidInput, match="unknown option 'mode'"):
        write_options({**PLACE, "mode": "x"})


def test_bad_rows() -> None:
    assert write_options(PLACE).on_bad_row == "fail-first"
    kept = {"onBadRow": "quarantine", "quarantinePath": "s3://bucket/bad"}
    assert write_options({**PLACE, **kept}).quarantine_path == "s3://bucket/bad"
    for given, says in (
        ({"onBadRow": "ignore"}, "onBadRow is one of 'fail-first', 'skip', 'quarantine', not"),
        ({"onBadRow": "quarantine"}, "go together"),
        ({"quarantinePath": "/bad"}, "go together"),
        ({"onBadRow": "quarantine", "quarantinePath": "bad"}, "from the root"),
        ({"onBadRow": "skip", "table": "assignments"}, "are for messages"),
    ):
        with pytest.raises(InvalidInput, match=says):
            write_options({**PLACE, **given})
    with pytest.raises(InvalidInput, match="unknown option 'onbadrow'"):
        read_options({**PLACE, "table": "log", "onBadRow": "skip"})


def test_chosen_columns_and_the_payload() -> None:
    for columns, expected in (
        ("offset", ("offset", "payload")),
        ("payload,offset", ("payload", "offset")),
    ):
        given = {**PLACE, "table": "log", "columns": columns, "payload": "true"}
        assert read_options(given).columns == expected


def test_a_store_is_not_read_without_its_server() -> None:
    url = "slatedb+s3://bucket/store"
    for check in (read_options, write_options):
        with pytest.raises(InvalidInput, match=f"penstock serve --store {re.escape(url)}") as said:
            check({"table": "messages", "store": url})
        assert "'server'" in str(said.value)
        assert "penstock.open_reader" in str(said.value)


def test_how_long_to_wait_for_a_broker_that_is_away() -> None:
    for given, retry_ms in ((None, 300_000), ("30s", 30_000), ("250", 250), ("2h", 7_200_000)):
        options = {**PLACE, "table": "log", **({} if given is None else {"retryFor": given})}
        assert locate(read_options(options, streaming=True).location).retry_ms == retry_ms
        written = write_options({**PLACE, **({} if given is None else {"retryFor": given})})
        assert locate(written.location).retry_ms == retry_ms
    with pytest.raises(InvalidInput, match=r"retryFor is a time like 5m, .*, not '5 days'"):
        read_options({**PLACE, "table": "log", "retryFor": "5 days"})
    # Jobs: as told, as the place says that was told before, or five minutes.
    place = located("grpc://h:1", retry_for="90s")
    assert (place.retry_ms, located(place).retry_ms, located("grpc://h:1").retry_ms) == (
        90_000, 90_000, 300_000,
    )  # fmt: skip
    assert located(place, retry_for="1s").retry_ms == 1_000
    assert place_of(place)["retryFor"] == "90000ms"
    assert read_options({**place_of(place), "table": "log"}).location == place
    with pytest.raises(InvalidInput, match="'soon' is not a time like 5m"):
        located("grpc://h:1", retry_for="soon")
    for job in (archive, backfill, collect, pipeline, publish, redrive, report, route):
        assert "retry_for" in signature(job).parameters, job.__name__
