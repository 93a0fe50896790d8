"""The kombu transport on a real server: names, bindings, messages, claims, leases, queues."""

from __future__ import annotations

import gc
import os
import threading
from datetime import UTC, datetime, timedelta
from queue import Empty
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.clients import tools
from tests.ports import free_ports
from tests.soaking import examples
from tests.waiting import wait_until

import penstock
from penstock.errors import InvalidInput, InvalidUrl, NotAllowed
from penstock.filters import Row, parse
from penstock.server import running
from penstock.server.keys import add_key
from penstock.validation import check_queue_name

try:
    import kombu
except ModuleNotFoundError:
    tools.missing("kombu")

from kombu.asynchronous.hub import Hub
from kombu.exceptions import ChannelError, OperationalError

from penstock.integrations.kombu import claims, messages, transport

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.client import Client

# --- names, bindings, messages --------------------------------------------------------------------


@given(st.text(max_size=100), st.text(max_size=100))
@examples(50)
def test_every_name_of_kombu_has_one_that_is_allowed(one: str, other: str) -> None:
    assert check_queue_name(messages.queue_name(one))
    assert (messages.queue_name(one) == messages.queue_name(other)) == (one == other)


def test_a_name_that_is_allowed_stays() -> None:
    assert messages.queue_name("celery") == "celery"
    assert messages.queue_name("celery@host.pidbox").startswith("celery-host.pidbox-")


def matches(pattern: list[str], key: list[str]) -> bool:
    """Match a topic as AMQP has it."""
    if not pattern:
        return not key
    if pattern[0] == "#":
        return any(matches(pattern[1:], key[skipped:]) for skipped in range(len(key) + 1))
    return bool(key) and pattern[0] in {"*", key[0]} and matches(pattern[1:], key[1:])


WORDS = st.sampled_from(["a", "b", "a%", "_", "it's", "!"])


@given(
    st.lists(WORDS | st.just("*"), min_size=1, max_size=4)
    | st.lists(WORDS | st.just("#"), min_size=1, max_size=4),
    st.lists(WORDS, min_size=1, max_size=5),
)
@examples(100)
def test_the_filter_of_a_topic_takes_what_amqp_would(pattern: list[str], key: list[str]) -> None:
    if pattern.count("#") > messages.MAX_HASHES:
        with pytest.raises(ChannelError, match="pattern"):
            messages.binding_of("x", "topic", ".".join(pattern))
        return
    taken = parse(messages.binding_of("x", "topic", ".".join(pattern)))
    row = Row({"exchange": "x", "routing_key": ".".join(key)})
    assert taken.matches(row) == matches(pattern, key)
    assert not taken.matches(Row({"exchange": "y", "routing_key": ".".join(key)}))


def test_bindings_are_added_to_a_filter_and_removed() -> None:
    text = parse("queue = 'q' AND size > 1").text
    one, two = (messages.binding_of(each, "fanout", "") for each in ("it's", "two"))
    both = messages.with_binding(messages.with_binding(text, one), two)
    assert messages.with_binding(both, parse(one).text) == both
    assert messages.without_binding(messages.without_binding(both, one), two) == text
    assert messages.without_binding(one, one) == "FALSE"
    for kind, key in (("headers", "a"), ("topic", "*.a.#")):
        with pytest.raises(ChannelError):
            messages.binding_of("x", kind, key)


def test_headers_become_attributes_within_bounds() -> None:
    headers: dict[str, Any] = {"task": "t", "id": "1", "eta": None, "kwargsrepr": "{}", "n": [1]}
    headers |= {"long": "x" * 257, "price": 1.5, "ok": True, "y" * 65: 1, "big": 1 << 63}
    headers |= {"nan": float("nan"), "torn": "\ud800", "\ud800": 1, "": 1}
    assert messages.attributes_of(headers) == {"task": "t", "id": "1", "price": 1.5, "ok": True}
    many = messages.attributes_of({f"h{number}": number for number in range(100)})
    assert len(many) == messages.MAX_HEADER_ATTRIBUTES


def test_an_eta_becomes_a_delay() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    now_ms = int(now.timestamp() * 1000)
    assert messages.delay_of((now + timedelta(days=900)).isoformat(), now_ms) == 900 * 86_400_000
    for text in (None, 5, "", "tomorrow", "2027-01-01T00:00:00", "2025-12-31T00:00:00+00:00"):
        assert messages.delay_of(text, now_ms) == 0
    assert messages.delay_of("9999-12-31T00:00:00Z", now_ms) > 0


# --- a server -------------------------------------------------------------------------------------


def client_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "penstock-client"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    # Other modules of this process may have clients open.
    before = client_threads()
    with running("memory:", native="127.0.0.1:0") as server:
        yield server.location("native")
    assert client_threads() <= before


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with penstock.connect(url) as client:
        yield client


@pytest.fixture
def connection(url: str, request: pytest.FixtureRequest) -> Iterator[kombu.Connection]:
    with connect(url, request) as connection:
        yield connection


def connect(url: str, request: pytest.FixtureRequest, **options: Any) -> kombu.Connection:
    """Connect with names that are the test's own: all tests share one server."""
    prefix = f"{request.node.name[:30]}-"
    return kombu.Connection(url, transport_options={"queue_name_prefix": prefix, **options})


def name_of(connection: kombu.Connection, queue: str) -> str:
    name: str = connection.transport.name_of(queue)
    return name


class Receiver:
    """A consumer that keeps its messages; they are acked by hand."""

    def __init__(self, connection: kombu.Connection, *queues: str, prefetch: int = 0) -> None:
        self.connection = connection
        self.messages: list[Any] = []
        self.channel = connection.channel()
        bound = [kombu.Queue(queue, routing_key=queue) for queue in queues]
        self.consumer = kombu.Consumer(
            self.channel, bound, on_message=self.messages.append, prefetch_count=prefetch or None
        )
        self.consumer.consume()

    def wait_for(self, count: int) -> None:
        """Wait for so many messages in all."""
        while len(self.messages) < count:
            self.connection.drain_events(timeout=30)

    def drain(self, count: int) -> list[Any]:
        """Wait for so many messages in all; return what they say."""
        self.wait_for(count)
        return self.payloads

    @property
    def payloads(self) -> list[Any]:
        return [each.payload for each in self.messages]

    def nothing_more(self) -> None:
        with pytest.raises(TimeoutError):
            self.connection.drain_events(timeout=0.1)


def publish(connection: kombu.Connection, queue: str, *bodies: Any, **options: Any) -> None:
    """Publish to a queue by its name, and declare it."""
    with connection.Producer() as producer:
        for body in bodies:
            declared = kombu.Queue(queue, routing_key=queue)
            producer.publish(body, routing_key=queue, declare=[declared], **options)


def test_the_prefetch_count_bounds_all_queues_of_a_channel(
    connection: kombu.Connection, client: Client
) -> None:
    for queue in ("one", "two", "three"):
        publish(connection, queue, *(f"{queue} {number}" for number in range(10)))
    receiver = Receiver(connection, "one", "two", "three", prefetch=2)
    receiver.drain(2)
    receiver.nothing_more()
    held = [client.stats(name_of(connection, queue)).in_flight for queue in ("one", "two", "three")]
    assert sum(held) == 2
    for number in range(30):
        receiver.drain(number + 1)
        receiver.messages[number].ack()
    # The queues took turns: none was a third behind.
    for queue in ("one", "two", "three"):
        assert sum(each.startswith(queue) for each in receiver.payloads[:18]) >= 4
    wait_until(lambda: client.stats(name_of(connection, "three")).done == 10)


def test_without_a_prefetch_count_unsettled_messages_are_no_bound(
    connection: kombu.Connection, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "MAX_BUFFERED", 3)
    publish(connection, "q", *range(10))
    receiver = Receiver(connection, "q")
    assert sorted(receiver.drain(10)) == list(range(10))
    receiver.messages[6].ack(multiple=True)
    wait_until(lambda: client.stats(name_of(connection, "q")).done == 7)


def test_messages_that_were_not_settled_go_back_unseen(
    url: str, request: pytest.FixtureRequest, client: Client
) -> None:
    with connect(url, request) as first:
        publish(first, "q", "a")
        Receiver(first, "q").drain(1)
        name = name_of(first, "q")
        assert client.stats(name).in_flight == 1
    assert client.stats(name).available == 1
    with connect(url, request) as second:
        receiver = Receiver(second, "q")
        receiver.drain(1)
        receiver.messages[0].requeue()
        receiver.drain(2)
        receiver.channel.basic_recover(requeue=True)
        receiver.drain(3)
        redelivered = [each.delivery_info["redelivered"] for each in receiver.messages]
        assert redelivered == [False, True, True]
        receiver.messages[2].reject()
        receiver.consumer.cancel()
    (done,) = client.browse(name, state="done")
    # What went back unseen was no attempt.
    attempts = client.attempts(name, done.message_id)
    assert [(each.consumer, each.end) for each in attempts] == [
        (claims.NAME, "released"),
        (claims.NAME, "acked"),
    ]


def test_leases_are_extended_while_messages_are_held(
    url: str, request: pytest.FixtureRequest, client: Client
) -> None:
    with connect(url, request, visibility_timeout=1) as connection:
        publish(connection, "q", "a")
        receiver = Receiver(connection, "q")
        receiver.drain(1)
        name = name_of(connection, "q")

        def deadline_ms() -> int:
            (entry,) = client.browse(name, state="in_flight")
            return entry.lease_deadline_ms or 0

        first_ms = deadline_ms()
        wait_until(lambda: deadline_ms() > first_ms + 1_000)
        assert client.stats(name).lease_expired_total == 0
        # A message that somebody takes away is no longer the consumer's: it is told apart.
        client.purge(name, states=["in_flight"])
        receiver.messages[0].ack()
        publish(connection, "q", "b")
        assert receiver.drain(2) == ["a", "b"]


def test_a_message_has_group_priority_delay_dedup_id_and_attributes(
    connection: kombu.Connection, client: Client
) -> None:
    headers = {"penstock_group": "acme", "penstock_dedup_id": "1", "task": "pay", "price": 12}
    for retries in (0, 0, 1):
        publish(connection, "q", "x", headers={**headers, "retries": retries}, priority=7)
    later = (datetime.now(UTC) + timedelta(days=700)).isoformat()  # noqa: TID251 - another clock
    publish(connection, "q", "later", headers={"eta": later}, priority=1_000)
    name = name_of(connection, "q")
    first, retry = client.browse(name)
    assert (first.group, first.priority) == (retry.group, retry.priority) == ("acme", 7)
    assert first.attributes == {"queue": name, "task": "pay", "price": 12}
    (delayed,) = client.browse(name, state="delayed")
    assert (delayed.visible_at_ms or 0) - delayed.published_at_ms > 699 * 86_400_000
    assert delayed.priority == 255
    # Whatever is wrong with a message is told to its producer.
    with pytest.raises(InvalidInput, match="group has 300 bytes"):
        publish(connection, "q", "x", headers={"penstock_group": "x" * 300})


def test_text_is_readable_and_bytes_come_whole(
    connection: kombu.Connection, client: Client
) -> None:
    publish(connection, "q", {"söme": "text"}, compression=None)
    publish(connection, "q", b"\0\xff", compression="zlib")
    shown = client.browse(name_of(connection, "q"))
    assert "text" in (shown[0].payload or b"").decode()
    receiver = Receiver(connection, "q")
    assert receiver.drain(2) == [{"söme": "text"}, b"\0\xff"]


def test_a_message_that_kombu_did_not_publish_is_all_body(
    connection: kombu.Connection, client: Client
) -> None:
    payloads = [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"properties": {"body_encoding": "base64"}, "body": "?"}',
        b'{"properties": {"body_encoding": 0, "delivery_info": 1}, "headers": {}, "body": ""}',
        b'{"properties": {"body_encoding": 0, "delivery_info": {}}, "headers": 1, "body": ""}',
        b'{"properties": {"body_encoding": 0, "delivery_info": {}}, "headers": {}, "body": 1}',
    ]
    receiver = Receiver(connection, "q")
    for number, payload in enumerate(payloads):
        client.send(name_of(connection, "q"), payload)
        receiver.wait_for(number + 1)
    assert [each.body or b"" for each in receiver.messages] == payloads
    assert {each.content_type for each in receiver.messages} == {"application/octet-stream"}


def test_exchanges_reach_the_queues_of_other_connections(
    url: str, request: pytest.FixtureRequest, client: Client
) -> None:
    logs = kombu.Exchange("logs", type="topic")
    news = kombu.Exchange("news", type="fanout")
    with connect(url, request) as here, connect(url, request) as there:
        channel = here.channel()
        bound = [
            kombu.Queue("errors", logs, routing_key="*.error")(channel),
            kombu.Queue("shop", logs, routing_key="shop.#")(channel),
            kombu.Queue("reader", news)(channel),
        ]
        for queue in bound:
            queue.declare()
        bound[2].bind_to(logs, "shop")
        producer = there.Producer()
        for key in ("shop.error", "shop", "bank.error", "bank.info"):
            producer.publish(key, exchange=logs, routing_key=key)
        producer.publish("news", exchange=news)
        found = {queue.name: set(drained(queue)) for queue in bound}
        assert found == {
            "errors": {"shop.error", "bank.error"},
            "shop": {"shop.error", "shop"},
            "reader": {"shop", "news"},
        }
        bound[2].unbind_from(news)
        producer.publish("news", exchange=news)
        producer.publish("shop", exchange=logs, routing_key="shop")
        assert drained(bound[2]) == ["shop"]
        assert bound[1].queue_declare(passive=True).message_count == 1
        assert bound[1].purge() == 1
        bound[1].delete(if_empty=True)
        with pytest.raises(ChannelError, match="NOT_FOUND"):
            bound[1].queue_declare(passive=True)


def drained(queue: Any) -> list[Any]:
    found = []
    while message := queue.get(no_ack=True):
        found.append(message.payload)
    return found


def test_temporary_queues_end_with_their_connection_or_in_time(
    url: str, request: pytest.FixtureRequest, client: Client
) -> None:
    def left() -> set[str]:
        prefix = name_of(connection, "")[:30]
        return {each.name.split("-")[-1] for each in client.queues() if each.name[:30] == prefix}

    with connect(url, request) as connection:
        queues = [
            kombu.Queue("own", kombu.Exchange("news", type="fanout"), exclusive=True),
            kombu.Queue("orphan", auto_delete=True, message_ttl=5),
            kombu.Queue("kept"),
        ]
        with kombu.Consumer(connection.channel(), queues):
            assert left() == {"own", "orphan", "kept"}
    assert left() == {"orphan", "kept"}
    name = name_of(connection, "orphan")
    assert client.queue(name).unclaimed_retention_ms == 5_000
    # Another connection that declares it keeps it, and its other labels.
    client.update_queue(name, labels={"team": "shop", transport.EXPIRES_LABEL: "1"})
    with connect(url, request) as another:
        queues[1](another.channel()).declare()
    assert client.queue(name).labels["team"] == "shop"
    assert int(client.queue(name).labels[transport.EXPIRES_LABEL]) > client.ping()
    # No connection has used it for an hour, by the server's clock.
    client.update_queue(name, labels={transport.EXPIRES_LABEL: str(client.ping() - 1)})
    with connect(url, request) as another:
        kombu.Queue("other", exclusive=True)(another.channel()).declare()
        wait_until(lambda: left() == {"kept", "other"})
    assert left() == {"kept"}


def test_transient_messages_that_nobody_wants_are_let_go(
    connection: kombu.Connection, client: Client
) -> None:
    events = kombu.Exchange("events", type="topic", delivery_mode="transient")
    connection.Producer().publish("x", exchange=events, routing_key="worker.heartbeat")
    assert client.stats(transport.TRANSIENT_QUEUE).enqueued_total == 1
    wait_until(lambda: client.stats(transport.TRANSIENT_QUEUE).removed_total == 1)


def test_an_event_loop_calls_consumers_and_hears_of_errors(
    url: str, request: pytest.FixtureRequest, client: Client
) -> None:
    hub = Hub()
    with connect(url, request) as connection:
        publish(connection, "q", "before")
        receiver = Receiver(connection, "q")
        connection.register_with_event_loop(hub)

        def run_until_there_are(count: int) -> None:
            while len(receiver.messages) < count:
                hub.run_once()

        run_until_there_are(1)
        publish(connection, "q", "after")
        run_until_there_are(2)
        client.delete_queue(name_of(connection, "q"))
        with pytest.raises(connection.connection_errors, match="no queue"):
            run_until_there_are(3)
    assert not hub.readers
    hub.close()


def test_a_connection_outlives_a_restart_of_its_server(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    store, address = f"rocksdb:{tmp_path}/db", f"127.0.0.1:{port}"
    with kombu.Connection(f"penstock://{address}") as connection:
        with running(store, native=address):
            publish(connection, "q", "before")
            receiver = Receiver(connection, "q")
            receiver.drain(1)
        receiver.messages[0].ack()
        with running(store, native=address), penstock.connect(f"penstock://{address}") as client:
            publish(connection, "q", "after")
            assert receiver.drain(2) == ["before", "after"]
            receiver.messages[1].ack()
            wait_until(lambda: client.stats("q").done == 2)


def test_a_server_that_stays_away_is_told_to_the_application(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    options = {"patience_ms": 300}
    with running("memory:", native=address):
        connection = kombu.Connection(f"penstock://{address}", transport_options=options)
        receiver = Receiver(connection, "q")
    with pytest.raises(connection.connection_errors, match="no server"):
        receiver.drain(1)
    connection.close()
    with pytest.raises(OperationalError, match="no server at"):
        connection.ensure_connection(max_retries=1, interval_start=0)
    # The next host is tried at once.
    with (
        running("memory:", native="127.0.0.1:0") as server,
        kombu.Connection(f"penstock://{address};{server.location('native')}") as other,
    ):
        publish(other, "q", "x")


def test_keys_and_tls(tmp_path: Path) -> None:
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    pair = authority.issue_cert("localhost", "127.0.0.1")
    pair.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    keys = tmp_path / "keys.toml"
    everything = add_key(keys, "all", ["all"])
    some = add_key(keys, "some", ["publish:q*", "consume:q*", "admin:q*"])
    pem = tmp_path / "server.pem"
    settings: dict[str, Any] = {"keys": keys, "tls_certificate": pem, "tls_key": pem}
    with running("memory:", native="127.0.0.1:0", **settings) as server:
        place = server.location("native").removeprefix("penstocks://")

        def enter(token: str) -> kombu.Connection:
            trusted = {"ca_certs": str(tmp_path / "ca.pem")}
            return kombu.Connection(f"penstocks://{token}{place}", ssl=trusted)

        with enter(f"all:{everything}@") as connection:
            publish(connection, "q", "a")
        with enter(f"some:{some}@") as connection:
            # Such a key may bind no queue to an exchange, but send to queues that it may use.
            exchange = kombu.Exchange("celery")
            queue = kombu.Queue("q2", exchange, routing_key="q2")(connection.channel())
            queue.declare()
            publish(connection, "q2", "b")
            assert drained(queue) == ["b"]
            with pytest.raises(NotAllowed):
                kombu.Queue("q3", kombu.Exchange("x", type="fanout"))(queue.channel).declare()
        for token in ("", "some:wrong@"):
            with pytest.raises(NotAllowed), enter(token) as connection:
                connection.connect()


def test_a_virtual_host_is_refused(url: str) -> None:
    with pytest.raises(InvalidUrl, match="queue_name_prefix"):
        kombu.Connection(f"{url}/shop").connect()
    for path in ("/", "//"):
        with kombu.Connection(f"{url}{path}") as connection:
            assert connection.connect()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_makes_its_own_connection(
    connection: kombu.Connection, client: Client
) -> None:
    publish(connection, "q", "parent")
    child = os.fork()
    if not child:
        try:
            publish(connection, "q", "child")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    publish(connection, "q", "parent")
    assert client.stats(name_of(connection, "q")).available == 3


def test_a_connection_that_nobody_closes_ends(url: str, request: pytest.FixtureRequest) -> None:
    before = client_threads()
    publish(connect(url, request), "q", "x")
    gc.collect()
    wait_until(lambda: client_threads() <= before)


def test_a_simple_queue_waits(connection: kombu.Connection) -> None:
    with connection.SimpleQueue("simple") as queue:
        queue.put("expired", expiration=0.001)
        threading.Event().wait(0.01)
        with pytest.raises(Empty):
            queue.get_nowait()
        queue.put("x")
        message = queue.get(timeout=30)
        assert message.payload == "x"
        message.ack()
