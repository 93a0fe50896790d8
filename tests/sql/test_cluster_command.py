"""``penstock cluster``: what it shows of a store, and how it changes the ring while brokers run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest
from click.testing import CliRunner
from tests.waiting import wait_until

import penstock
from penstock import ManualClock, Message
from penstock.cli.main import cli
from penstock.store.sql import inspect
from penstock.store.sql.database import statements_of
from penstock.store.sql.location import Tunables
from penstock.store.sql.store import SqlStore
from penstock.store.sql.zones import token_of
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from click.testing import Result
    from tests.sql.postgres import PostgresServer

    from penstock import Broker

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["cluster", *words], env={"PENSTOCK_STORE": None})


def seen(url: str, *words: str) -> Any:
    result = run(*(words or ("status", "--over", "1ms")), "--json", "--store", url)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*words: str, code: int = 1) -> str:
    result = run(*words)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.stderr.split())


def send(broker: Broker, groups: int, first: int = 0) -> None:
    broker.publish(
        [Message(b"x", {"queue": "q"}, group=f"g{n}") for n in range(first, first + groups)]
    )


def core_of(broker: Broker) -> Any:
    store = broker._store
    assert isinstance(store, SqlStore)
    return store


def impatient(broker: Broker) -> None:
    """Have zones collected as soon as they are empty."""
    core = core_of(broker)
    core.tunables = Tunables(min_inactive_ms=0, cool_ms=1, trust_ms=0)


# --- status ---------------------------------------------------------------------------------------


def test_status_of_a_store_with_tokens(url: str) -> None:
    with penstock.open(url + "?ring_size=8", background=False) as broker:
        broker.create_queue("q")
        empty = seen(url)
        assert (empty["zones"], empty["tokens"], empty["rehashed"]) == (0, [], 1.0)
        send(broker, 50)
        broker.publish([Message(b"", {"queue": "q"}, group="later", delay_ms=60_000)])
        broker.claim("q", limit=3)
        found = seen(url)
        number = core_of(broker).queue("q").number
        assert found["store_id"] == core_of(broker).store_id.to_bytes(4, "big").hex()
    tokens = [token_of(number, f"g{n}".encode(), 8) for n in range(50)]
    tokens.append(token_of(number, b"later", 8))
    assert {each["token"]: each["pointers"] for each in found["tokens"]} == {
        token: tokens.count(token) for token in set(tokens)
    }
    assert (found["ring_size"], found["ring_high"]) == (8, 8)
    assert (found["zones"], found["old_tokens"]) == (51, 0)
    assert (found["waiting"], found["in_flight"]) == (48, 3)
    # Those of which the only message is held, or is to come, have not vested.
    assert found["vested"] == sum(each["vested"] for each in found["tokens"])
    assert 47 <= found["vested"] <= 50
    assert 0 <= found["oldest_lag_ms"] < 60_000


def test_status_as_a_table(url: str) -> None:
    with penstock.open(url + "?ring_size=100", background=False) as broker:
        broker.create_queue("q")
        send(broker, 200)
        core_of(broker).database.execute("UPDATE pointers SET vesting_ms = vesting_ms - 5000")
        said = run("status", "--over", "1ms", "--store", url).stdout
        assert "ring of 100, claims look at tokens below 100" in said
        assert "200 zones, 0 empty; all have the token of this ring" in said
        assert re.search(r"200 vested, the oldest for [5-9],\d\d\d ms", said)
        assert "200 messages waiting, 0 in flight" in said
        shown = len({each["token"] for each in seen(url)["tokens"]})
        assert f"the fullest 20 of {shown} tokens" in said
        # After the sixteen logs.
        assert len(re.findall(r"^│ +\d+ │", said, re.MULTILINE)) == 16 + 20


def test_status_shows_logs_with_rates_and_waits(url: str, postgres: PostgresServer) -> None:
    with (
        penstock.open(f"{url}?logs=3", background=False) as broker,
        penstock.open(url, background=False) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        broker.create_queue("q")
        send(broker, 30)
        found = seen(url)
        assert [each["log"] for each in found["logs"]] == [0, 1, 2]
        assert sum(each["published"] for each in found["logs"]) == 30
        assert max(each["head"] for each in found["logs"]) == found["next_id"] == 31
        assert [each["waiting"] for each in found["logs"]] == [0, 0, 0]
        group = next(f"g{n}" for n in range(99) if crc32(f"g{n}".encode()) % 3 == 1)
        message = Message(b"x", {"queue": "q"}, group=group)
        with postgres.connect(url.rpartition("/")[2]) as holder:
            holder.execute("BEGIN; SELECT 1 FROM penstock.log_heads WHERE log = 1 FOR UPDATE")
            late = [pool.submit(each.publish, [message]) for each in (broker, other)]
            wait_until(lambda: seen(url)["logs"][1]["waiting"] == 2)
            assert [each["waiting"] for each in seen(url)["logs"]] == [0, 2, 0]
            holder.execute("ROLLBACK")
        for each in late:
            each.result(timeout=60)
        looking = pool.submit(seen, url, "status", "--over", "3s")
        sent = 0
        while not looking.done():
            broker.publish([message])
            sent += 1
        assert 0 < looking.result()["logs"][1]["per_second"] <= sent


def test_old_tokens_are_counted_over_pages(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "PAGE", 7)
    with penstock.open(url + "?ring_size=4", background=False) as broker:
        broker.create_queue("q")
        send(broker, 49)
        number = core_of(broker).queue("q").number
        broker._store.set_ring_size(6, 0)  # type: ignore[attr-defined]
    names = [f"g{n}".encode() for n in range(49)]
    old = sum(token_of(number, name, 4) != token_of(number, name, 6) for name in names)
    found = seen(url)
    assert (found["zones"], found["old_tokens"]) == (49, old)
    assert 0 < old < 49
    assert found["rehashed"] == pytest.approx(1 - old / 49)


@pytest.mark.parametrize("store", ["memory:", "rocksdb:./data"])
@pytest.mark.parametrize("words", [("status",), ("resize", "4")])
def test_other_stores_are_refused(store: str, words: tuple[str, ...]) -> None:
    assert "is not on a SQL database" in refused(*words, "--store", store)


@pytest.mark.parametrize("words", [("status",), ("resize", "4")])
def test_a_server_is_refused(words: tuple[str, ...]) -> None:
    said = refused(*words, "--store", "penstock://127.0.0.1:1")
    assert "name the database" in said


@pytest.mark.parametrize("words", [("status",), ("resize", "4")])
def test_where_there_is_no_store_none_is_made(url: str, words: tuple[str, ...]) -> None:
    for _ in range(2):
        said = refused(*words, "--store", url)
        assert "schema 'penstock'; 'penstock create' makes one" in said
    assert "does not exist" in refused(*words, "--store", url + "_not")


def test_only_commands_that_are_to_make_a_store_do(url: str) -> None:
    for words in (["queues"], ["send", "q", "x"], ["stats"], ["check"]):
        result = CliRunner().invoke(cli, [*words, "--store", url])
        assert result.exit_code == 1
        assert "there is no store at postgresql://" in result.stderr
    assert CliRunner().invoke(cli, ["create", "q", "--store", url]).exit_code == 0
    assert CliRunner().invoke(cli, ["send", "q", "x", "--store", url]).exit_code == 0
    assert seen(url)["waiting"] == 1


def test_a_password_is_not_shown() -> None:
    said = refused("status", "--store", "mysql://me:secret@host/db")
    assert "secret" not in said
    assert "me" in said


# --- resize ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["0", "4097"])
def test_rings_that_are_too_small_or_too_large(url: str, size: str) -> None:
    penstock.open(url, background=False).close()
    assert f"{size} is not from 1 to 4,096" in refused("resize", size, "--store", url, code=2)
    assert seen(url)["ring_size"] == 1


def test_a_broker_that_runs_takes_the_new_ring(url: str) -> None:
    with penstock.open(url, background=False) as broker, penstock.open(url) as other:
        broker.create_queue("q")
        send(broker, 20)
        found = seen(url, "resize", "16")
        assert (found["ring_size"], found["ring_high"]) == (16, 16)
        number = core_of(broker).queue("q").number
        old = sum(token_of(number, f"g{n}".encode(), 16) != 0 for n in range(20))
        assert found["old_tokens"] == old > 0
        # Those that are there keep theirs; new ones are of the new ring.
        send(broker, 20, first=100)
        send(broker, 20)
        found = seen(url)
        assert (found["zones"], found["old_tokens"]) == (40, old)
        assert len(found["tokens"]) > 5
        got: list[str] = []
        while len(got) < 60:
            deliveries = other.claim("q", limit=100, wait_ms=5_000)
            assert deliveries
            got += [each.group for each in deliveries]
        assert sorted(got) == sorted([f"g{n % 20}" for n in range(40)] +
                                     [f"g{n}" for n in range(100, 120)])  # fmt: skip
        assert_clean(broker)


def test_a_claim_that_waits_sees_a_token_of_a_ring_that_has_grown(url: str) -> None:
    with penstock.open(url) as waiting, penstock.open(url, background=False) as other:
        other.create_queue("q")
        number = core_of(other).queue("q").number
        # Beyond the ring that whoever waits knows.
        group = next(f"g{n}" for n in range(99) if token_of(number, f"g{n}".encode(), 64) > 32)
        with ThreadPoolExecutor(1) as pool:
            claim = pool.submit(waiting.claim, "q", wait_ms=60_000)
            while not waiting._runner._waiters:
                threading.Event().wait(0.001)
            seen(url, "resize", "64")
            other.publish([Message(b"x", {"queue": "q"}, group=group)])
            (delivery,) = claim.result(timeout=30)
        assert delivery.group == group


def test_a_ring_that_has_shrunk_is_known_to_whoever_makes_zones(url: str) -> None:
    """Not only to publishers: a redrive makes zones too, and may be long behind."""
    clock = ManualClock()
    with penstock.open(url + "?ring_size=64", background=False, clock=clock) as broker:
        broker.create_queue("q", max_attempts=1)
        send(broker, 20)
        broker.release([each.receipt for each in broker.claim("q", limit=20)])
        core_of(broker).database.execute("DELETE FROM pointers; DELETE FROM pointer_index")
        found = seen(url, "resize", "1")
        assert (found["ring_high"], found["zones"]) == (1, 0)
        assert broker.redrive("q") == 20
        assert seen(url)["old_tokens"] == 0
        assert len(broker.claim("q", limit=20)) == 20


def test_wait_until_every_zone_has_a_token_of_the_ring(url: str) -> None:
    with penstock.open(url + "?ring_size=32", background=False) as broker:
        broker.create_queue("q")
        send(broker, 150)
        found = run("resize", "3", "--wait", "--timeout", "1ms", "--json", "--store", url)
        assert found.exit_code == 1
        left = json.loads(found.stdout)
        assert left["old_tokens"] > 0
        assert (left["ring_size"], left["ring_high"]) == (3, 32)
        impatient(broker)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(seen, url, "resize", "3", "--wait", "--timeout", "60s")
            done = 0
            while done < 150 or not waiting.done():
                deliveries = broker.claim("q", limit=50)
                broker.ack([each.receipt for each in deliveries])
                done += len(deliveries)
                broker.sweep()
            after = waiting.result(timeout=60)
        assert (after["old_tokens"], after["ring_high"]) == (0, 3)
        assert after["rehashed"] == 1.0
        assert core_of(broker).zones.collected + after["this_process"]["collected"] > 0
        send(broker, 30)
        assert len(broker.claim("q", limit=100)) == 30
        assert_clean(broker)


def test_several_databases_are_refused(url: str) -> None:
    penstock.open(url, background=False).close()
    for command in (("status",), ("resize", "2"), ("split", "q")):
        assert "a store is in one database" in refused(*command, "--store", f"{url};{url}")


def test_the_command_as_a_process(url: str) -> None:
    penstock.open(url, background=False).close()
    command = [sys.executable, "-W", "error", "-m", "penstock", "cluster"]
    environment = {**os.environ, "PENSTOCK_STORE": url, "PYTHONPATH": str(ROOT / "src")}
    resized = subprocess.run(
        [*command, "resize", "5", "--wait"], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert resized.returncode == 0, resized.stderr
    assert "ring of 5" in resized.stdout
    assert resized.stderr == ""


def test_ranges_are_split_on_cockroachdb_alone(url: str) -> None:
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q")
    assert "no ranges to split" in refused("split", "q", "--store", url)
    for name in ("split_pointers", "split_vesting"):
        assert b"SPLIT AT" in statements_of("cockroachdb")[name].text
        assert name not in statements_of("postgresql")
