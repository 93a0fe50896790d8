"""Misspelt names of queues, settings and options: the error says which was meant."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from tests.waiting import wait_until

import penstock
from penstock import InvalidInput, InvalidQueue, InvalidUrl, QueueExists, QueueNotFound
from penstock.flight.client import FlightStore
from penstock.server import running
from penstock.server.keys import add_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def broker() -> Iterator[penstock.Broker]:
    with penstock.open("memory:", background=False) as opened:
        opened.create_queue("orders", lease_ms=5_000)
        yield opened


def text_of(call: Callable[[], Any]) -> str:
    with pytest.raises(QueueNotFound) as caught:
        call()
    return str(caught.value)


VERBS: dict[str, Callable[[Any, str], Any]] = {
    "claim": lambda broker, name: broker.claim(name),
    "send": lambda broker, name: broker.send(name, b""),
    "stats": lambda broker, name: broker.stats(name),
    "update_queue": lambda broker, name: broker.update_queue(name, lease_ms=1_000),
    "purge": lambda broker, name: broker.purge(name),
    "move": lambda broker, name: broker.move("orders", name),
}
MISTAKES = ["order", "orderss", "oders", "ordres", "orders.", "prders", "orders_", "Orders"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_names_the_nearest_queue(broker: penstock.Broker, verb: str) -> None:
    said = text_of(lambda: VERBS[verb](broker, "oders"))
    assert said == "no queue named 'oders'; did you mean 'orders'?"


@pytest.mark.parametrize("name", MISTAKES)
def test_one_mistake_is_understood(broker: penstock.Broker, name: str) -> None:
    assert text_of(lambda: broker.claim(name)).endswith("; did you mean 'orders'?")


@pytest.mark.parametrize("name", ["mail", "", "or", "x" * 41, "orders" * 100_000, 5])
def test_another_name_is_not(broker: penstock.Broker, name: Any) -> None:
    said = text_of(lambda: broker.claim(name))
    assert "did you mean" not in said
    assert len(said) < 200


def test_the_error_does_not_keep_the_queues(broker: penstock.Broker) -> None:
    with pytest.raises(QueueNotFound) as caught:
        broker.claim("oders")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_server_names_only_queues_that_the_key_sees(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    grants = {"root": "all", "team": "all:mail-*", "eu": "all:mail-e*"}
    tokens = {name: f"{name}:{add_key(keys, name, [allow])}" for name, allow in grants.items()}
    with running("memory:", native="127.0.0.1:0", flight="127.0.0.1:0", keys=keys) as server:
        native, flight = server.location("native"), server.location("flight")
        with penstock.connect(native, token=tokens["root"]) as root:
            root.create_queue("mail-au")

        def told(key: str, verb: str) -> str:
            with penstock.connect(native, token=tokens[key]) as client:
                return text_of(lambda: VERBS[verb](client, "mail-eu"))

        for verb in ("claim", "send", "stats"):
            assert told("root", verb) == "no queue named 'mail-eu'; did you mean 'mail-au'?"
            assert told("team", verb) == "no queue named 'mail-eu'; did you mean 'mail-au'?"
            assert told("eu", verb) == "no queue named 'mail-eu'"
        for key, hint in (("team", "; did you mean 'mail-au'?"), ("eu", "")):
            store = FlightStore(flight, token=tokens[key])
            for ask in (
                lambda store=store: store.plan_read("done", queue=["mail-eu"]),
                lambda store=store: store.backfill_plan("mail-eu"),
            ):
                assert text_of(ask) == f"no queue named 'mail-eu'{hint}"


def test_two_claims_of_one_commit_share_an_error_and_no_suggestion(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    grants = {"root": "all", "eu": "all:mail-e*"}
    tokens = {name: f"{name}:{add_key(keys, name, [allow])}" for name, allow in grants.items()}
    with running("memory:", native="127.0.0.1:0", keys=keys) as server, ExitStack() as stack:
        clients = [
            stack.enter_context(penstock.connect(server.location("native"), token=tokens[name]))
            for name in ("root", "eu")
        ]
        clients[0].create_queue("mail-au")
        clients[0].create_queue("mail-eu")
        with ThreadPoolExecutor(2) as threads:
            # Parked together, and ended together when their queue goes.
            waits = [threads.submit(each.claim, "mail-eu", wait_ms=60_000) for each in clients]
            wait_until(lambda: server.batcher.parked == len(waits))
            clients[0].delete_queue("mail-eu")
            said = [str(each.exception()) for each in waits]
    assert said == [
        "no queue named 'mail-eu'; did you mean 'mail-au'?",
        "no queue named 'mail-eu'",
    ]


def test_settings_that_differ_are_named(broker: penstock.Broker) -> None:
    with pytest.raises(QueueExists) as caught:
        broker.create_queue("orders")
    assert str(caught.value) == (
        "queue 'orders' exists with other settings: lease_ms is 5000 there, 30000 was asked for; "
        "use update_queue()"
    )
    with pytest.raises(QueueExists, match=r"'fifo' was asked for; its ordering can't be changed$"):
        broker.create_queue("orders", lease_ms=5_000, ordering="fifo")
    with pytest.raises(InvalidQueue, match="no setting 'leasems'; did you mean 'lease_ms'"):
        broker.create_queue("mail", leasems=5)


URLS = {
    "rocksdb:./data?desing=x": "rocksdb: has no option 'desing' .*; did you mean 'design'",
    "memory:?min_free_bytes=1": "memory: has no option 'min_free_bytes' .*; known: design$",
    "memory:?design=bucket": "there is no design 'bucket'; did you mean 'buckets'",
    "rocksdb:./data?min_free_bytes=1G": "min_free_bytes is '1G' .*; it must be a number of bytes",
    "rocksdb:./data?write_buffer_mb=7": "write_buffer_mb is '7' .*; it must be 8 to 65536 MiB",
    "rocksdb:./data?block_cache_mb=1e3": "block_cache_mb is '1e3' .*; it must be 8 to 65536 MiB",
    "memory:?block_cache_mb=8": "memory: has no option 'block_cache_mb' .*; known: design$",
}


@pytest.mark.parametrize("url", URLS)
def test_options_of_a_url(url: str) -> None:
    with pytest.raises(InvalidUrl, match=URLS[url]):
        penstock.open(url)


def test_a_store_that_has_no_readers_names_those_that_have() -> None:
    with pytest.raises(InvalidUrl, match=r"works on object storage alone .*; ask the server"):
        penstock.open_reader("rocksdb:./data")


def test_a_directory_without_a_scheme() -> None:
    with pytest.raises(InvalidUrl, match=r"; a directory is named by rocksdb:\./data; known are"):
        penstock.open("./data")


def test_states_are_a_list(broker: penstock.Broker) -> None:
    with pytest.raises(InvalidInput, match="states must be a list of states, not 'done' alone"):
        broker.purge("orders", states="done")
