"""Who may do what: every verb of every listener, by every kind of key, on either of two queues.

What a key may do is told here by the permissions that ``docs/server.md`` promises, and not by the
code that checks them. A verb that the code has and the tables have not fails the tests.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import boto3
import capnp
import pyarrow as pa
import pyarrow.flight as fl
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from tests.server.conftest import request as ask_page
from tests.waiting import wait_until

import penstock
from penstock import InvalidInput, Message, NotAllowed, PenstockError, QueueNotFound
from penstock import server as gateways
from penstock.client.calls import Verbs
from penstock.flight import TABLES
from penstock.flight.client import FlightStore
from penstock.flight.protocol import PUTS, HistoryStretch, HistoryTicket, LogTicket
from penstock.flight.service import FlightService
from penstock.model import Cursor
from penstock.server import admin as operations
from penstock.server import running
from penstock.server.keys import add_key
from penstock.server.native.requests import VERBS
from penstock.server.sqs import OPERATIONS
from penstock.wire import native as wire
from penstock.wire.sqs.messages import handle_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.server import Server

# It reads the description of SQS once, not for each client.
BOTO = boto3.session.Session()

QUEUES = ("a", "b")
# Names of backups are used once.
BACKUPS = itertools.count()
# Without a key, with keys for one queue or for a pattern, and with those for all of them.
KEYS: dict[str, list[str]] = {
    "nobody": [],
    "elsewhere": ["all:other"],
    "publish-a": ["publish:a"],
    "consume-a": ["consume:a"],
    "consume-b": ["consume:b"],
    "admin-a": ["admin:a"],
    "some": ["consume:a*", "admin:a*", "publish:*b"],
    "viewer": ["consume:*"],
    "admin": ["admin:*"],
    "publisher": ["publish"],
    "root": ["all"],
}
EVERYBODY = "everybody"
# Any key that is known.
KNOWN = "known"
ANY = "consume|publish|admin"
LOOK = "consume:*|admin:*"


class Row(NamedTuple):
    """A verb, how it is called, and what it needs.

    Each need is one of several permissions: ``consume`` on the queue at hand, ``consume:*`` on all.
    """

    verb: str
    act: Callable[[Any, World, str], Any]
    needs: tuple[str, ...]

    def allowed(self, key: str, queue: str) -> bool:
        if self.needs in {(EVERYBODY,), (KNOWN,)}:
            return bool(KEYS[key]) or self.needs == (EVERYBODY,)
        return all(any(holds(key, each, queue) for each in need.split("|")) for need in self.needs)


def row(verb: str, act: Callable[[Any, World, str], Any], *needs: str) -> Row:
    return Row(verb, act, needs)


def but(act: Callable[[Any, World, str], Any], text: str) -> Callable[[Any, World, str], Any]:
    """Take an error for a success: whoever gets to it was let in."""

    def tried(client: Any, world: World, queue: str) -> None:
        try:
            act(client, world, queue)
        except (PenstockError, ClientError) as error:
            if text not in str(error):
                raise

    return tried


def holds(key: str, permission: str, queue: str) -> bool:
    wanted, _, scope = permission.partition(":")
    for text in KEYS[key]:
        action, _, pattern = text.partition(":")
        everywhere = pattern in {"", "*"}
        there = everywhere if scope == "*" else everywhere or fnmatchcase(scope or queue, pattern)
        if action in {wanted, "all"} and there:
            return True
    return False


class World(NamedTuple):
    """A served store with the queues, and what was claimed from them for somebody else."""

    broker: penstock.Broker
    server: Server
    tokens: dict[str, str]

    def claimed(self, *queues: str) -> list[str]:
        receipts = []
        for queue in queues:
            self.broker.send(queue, b"x")
            receipts += [each.receipt for each in self.broker.claim(queue)]
        return receipts

    def lease(self, queue: str) -> str:
        return self.claimed(queue)[0].rpartition("-")[0]

    def restored(self, queue: str) -> None:
        try:
            self.broker.queue(queue)
        except QueueNotFound:
            self.broker.create_queue(queue)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    place = tmp_path_factory.mktemp("permissions")
    path = place / "keys.toml"
    (place / "backups").mkdir()
    tokens = {
        name: f"{name}:{add_key(path, name, grants, sqs=True)}" if grants else "nobody:x"
        for name, grants in KEYS.items()
    }
    listeners: dict[str, Any] = dict.fromkeys(("native", "http", "flight"), "127.0.0.1:0")
    with (
        penstock.open(f"rocksdb:{place}/db", durability="relaxed") as broker,
        running(broker, **listeners, keys=path, backup_directory=place / "backups") as server,
    ):
        for queue in (*QUEUES, "other"):
            broker.create_queue(queue)
        broker.create_queue("new", filter="kind = 'new'")
        yield World(broker, server, tokens)


def judge(
    world: World,
    rows: list[Row],
    client_of: Callable[[str], Any],
    refused: Callable[[Exception], bool] = lambda error: isinstance(error, NotAllowed),
) -> None:
    """Call every verb with every key on every queue, and compare with what was promised."""
    wrong = []
    for key in KEYS:
        client = client_of(key)
        for each in rows:
            for queue in QUEUES:
                before = depths(world)
                try:
                    each.act(client, world, queue)
                except Exception as error:
                    if not refused(error):
                        raise
                    denied = True
                    # Neither changed nor told anything that was not asked about.
                    if not changes_by_itself(each) and depths(world)[queue] != before[queue]:
                        wrong.append((each.verb, key, queue, "refused, but changed something"))
                else:
                    denied = False
                finally:
                    world.restored(queue)
                if denied is each.allowed(key, queue):
                    wrong.append((each.verb, key, queue, "refused" if denied else "allowed"))
    assert wrong == []


def changes_by_itself(each: Row) -> bool:
    # These rows claim from the queue on behalf of somebody else before they try.
    return each.verb.startswith(("Ack", "Consume", "Release", "Extend", "Delete", "Change"))


def depths(world: World) -> dict[str, Any]:
    found = {each: world.broker.stats(each) for each in QUEUES}
    return {name: (s.available, s.delayed, s.done, s.failed) for name, s in found.items()}


# --- native ---------------------------------------------------------------------------------------


def naming(queue: str | None) -> list[Message]:
    return [Message(b"x", {} if queue is None else {"queue": queue})]


def other(queue: str) -> str:
    return "b" if queue == "a" else "a"


class Refused:
    """A client that never got in: whatever it is asked for was refused with its greeting."""

    def __init__(self, error: NotAllowed) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error


def consumed(client: Any, world: World, queue: str) -> None:
    world.broker.send(queue, b"x")
    with client.consume(queue, wait_ms=60_000) as consumer:
        next(consumer).ack()


NATIVE = [
    row("Publish", lambda c, _, q: c.publish(naming(q)), "publish"),
    row("Publish", lambda c, _, q: c.send(q, b"x"), "publish"),
    row("Publish to all", lambda c, _, q: c.publish(naming(None)), "publish:*"),
    row(
        "Publish to two",
        lambda c, _, q: c.publish(naming(q) + naming(other(q))),
        "publish:a",
        "publish:b",
    ),
    row("Claim", lambda c, _, q: c.claim(q), "consume"),
    row("Claim and wait", lambda c, _, q: c.claim(q, wait_ms=1), "consume"),
    row("Ack", lambda c, w, q: c.ack(w.claimed(q)), "consume"),
    row("Ack, named", lambda c, w, q: c.ack(w.claimed(q), queue=q), "consume"),
    row("Ack of two", lambda c, w, q: c.ack(w.claimed(q, other(q))), "consume:a", "consume:b"),
    row("Release", lambda c, w, q: c.release(w.claimed(q), delay_ms=0), "consume"),
    row("Release, named", lambda c, w, q: c.release(w.claimed(q), queue=q), "consume"),
    row("Release of two", lambda c, w, _: c.release(w.claimed("a", "b")), "consume:a", "consume:b"),
    row("Extend", lambda c, w, q: c.extend(w.claimed(q), lease_ms=9_000), "consume"),
    row("Extend a lease", lambda c, w, q: c.extend(w.lease(q), lease_ms=9_000), "consume"),
    row(
        "Extend, named", lambda c, w, q: c.extend(w.claimed(q), lease_ms=9_000, queue=q), "consume"
    ),
    row(
        "Extend of two",
        lambda c, w, _: c.extend(w.claimed("a", "b"), lease_ms=9_000),
        "consume:a",
        "consume:b",
    ),
    row("Browse", lambda c, _, q: c.browse(q), "consume"),
    row("Attempts", lambda c, _, q: c.attempts(q, 1), "consume"),
    row("Explain", lambda c, _, q: c.explain(q, 1), "consume"),
    row("Stats", lambda c, _, q: c.stats(q), "consume"),
    row("StoreStats", lambda c, *_: c.store_stats(), LOOK),
    row("Queues", lambda c, *_: c.queues(), LOOK),
    row("Queue", lambda c, _, q: c.queue(q), ANY),
    row("CreateQueue", lambda c, _, q: c.create_queue(q), "admin"),
    row(
        "CreateQueue with a filter",
        lambda c, *_: c.create_queue("new", filter="kind = 'new'"),
        "admin:*",
    ),
    row("UpdateQueue", lambda c, _, q: c.update_queue(q, description=""), "admin"),
    row(
        "UpdateQueue, filter", lambda c, *_: c.update_queue("new", filter="kind = 'new'"), "admin:*"
    ),
    row(
        "UpdateQueue, dead letters",
        lambda c, _, q: (c.update_queue(q, dead_letter="other"), c.update_queue(q, dead_letter="")),
        "admin",
        "publish:other|admin:other",
    ),
    row("DeleteQueue", lambda c, _, q: c.delete_queue(q), "admin"),
    row("Redrive", lambda c, _, q: c.redrive(q), "admin"),
    row("Purge", lambda c, _, q: c.purge(q), "admin"),
    row("Move", lambda c, _, q: c.move(q, "other"), "admin", "publish:other|admin:other"),
    row("ReadLog", lambda c, *_: c.read_log(), LOOK),
    row("Assign", but(lambda c, *_: c.assign(0, Cursor(0, 0), {}), "routes inline"), "admin:*"),
    row("TakeEpoch", lambda c, *_: c.take_epoch(), "admin:*"),
    row("Backfill", lambda c, _, q: c.backfill(q), "admin"),
    row("ConfigureLog", lambda c, *_: c.configure_log(), "admin:*"),
    row("LogStats", lambda c, *_: c.log_stats(), LOOK),
    row("Info", lambda c, *_: c.info(), LOOK),
    row("AllStats", lambda c, *_: c.all_stats(), LOOK),
    row("Sweep", lambda c, *_: c.sweep(), "admin:*"),
    row("Backup", lambda c, *_: c.backup(f"n{next(BACKUPS)}"), "admin:*"),
    row("Consume", consumed, "consume"),
]


def test_native(world: World) -> None:
    place = world.server.location("native")
    clients = []

    def client_of(key: str) -> Any:
        try:
            clients.append(penstock.connect(place, token=world.tokens[key], dedup=False))
        except NotAllowed as error:
            return Refused(error)
        return clients[-1]

    try:
        judge(world, NATIVE, client_of)
    finally:
        for client in clients:
            client.close()


def test_every_native_request_is_in_the_table() -> None:
    told = {each.verb.replace(",", "").split()[0] for each in NATIVE}
    assert told == {"Consume", *(kind.__name__ for kind in VERBS)}
    # What is asked of a connection and not of the store: the time, and to end a claim of its own,
    # or to go on with it.
    kinds = {kind.__name__ for kind in wire.Request.__subclasses__()}
    assert kinds - told == {"Ping", "Cancel", "Credit"}
    names = {name for name in vars(Verbs) if not name.startswith("_")}
    known = {each.lower() for each in kinds}
    assert {name.replace("_", "") for name in names} - known <= {"send", "ping", "cancel"}


# --- SQS ------------------------------------------------------------------------------------------


def arn(queue: str) -> str:
    return f"arn:aws:sqs:us-east-1:000000000000:{queue}"


def url(world: World, queue: str) -> str:
    return f"{world.server.location('http')}/000000000000/{queue}"


def handle(world: World, queue: str) -> str:
    world.broker.send(queue, b"x")
    return handle_of(world.broker.claim(queue)[0])


def on(operation: str, **arguments: Any) -> Callable[[Any, World, str], Any]:
    """Call an operation on a queue; arguments that are functions are told the world and queue."""

    def act(client: Any, world: World, queue: str) -> Any:
        given = {
            name: value(world, queue) if callable(value) else value
            for name, value in arguments.items()
        }
        return getattr(client, operation)(QueueUrl=url(world, queue), **given)

    return act


def sqs_of(world: World, key: str) -> Any:
    key_id, _, secret = world.tokens[key].partition(":")
    return BOTO.client(
        "sqs",
        region_name="us-east-1",
        aws_access_key_id=key_id,
        aws_secret_access_key=secret,
        endpoint_url=world.server.location("http"),
        config=Config(retries={"max_attempts": 0}, parameter_validation=False),
    )


def cancel_a_move(client: Any, world: World, queue: str) -> None:
    """Cancel what somebody else has begun and ended."""
    root = sqs_of(world, "root")
    tasks = root.list_message_move_tasks(SourceArn=arn(queue)).get("Results", [])
    handles = MOVES.get(queue) if tasks else None
    if handles is None:
        world.broker.create_queue("source", dead_letter=queue, max_attempts=1)
        world.broker.send(queue, b"x")
        move = {"SourceArn": arn(queue), "DestinationArn": arn("other")}
        MOVES[queue] = root.start_message_move_task(**move)["TaskHandle"]
        wait_until(
            lambda: (
                root.list_message_move_tasks(SourceArn=arn(queue))["Results"][0]["Status"]
                != "RUNNING"
            )
        )
        world.broker.delete_queue("source")
    client.cancel_message_move_task(TaskHandle=MOVES[queue])


MOVES: dict[str, str] = {}
ENTRY = {"Id": "1", "MessageBody": "x"}
GONE = "Only active tasks can be cancelled"
NO_SOURCE = "must be configured as a Dead Letter Queue"

SQS = [
    row(
        "AddPermission",
        but(
            on("add_permission", Label="l", AWSAccountIds=["000000000000"], Actions=["*"]),
            "already exist",
        ),
        "admin",
    ),
    row("CancelMessageMoveTask", but(cancel_a_move, GONE), "admin"),
    row(
        "ChangeMessageVisibility",
        on("change_message_visibility", ReceiptHandle=handle, VisibilityTimeout=9),
        "consume",
    ),
    row(
        "ChangeMessageVisibilityBatch",
        on(
            "change_message_visibility_batch",
            Entries=lambda w, q: [
                {"Id": "1", "ReceiptHandle": handle(w, q), "VisibilityTimeout": 0}
            ],
        ),
        "consume",
    ),
    row("CreateQueue", lambda c, _, q: c.create_queue(QueueName=q), "admin"),
    row("DeleteMessage", on("delete_message", ReceiptHandle=handle), "consume"),
    row(
        "DeleteMessageBatch",
        on(
            "delete_message_batch",
            Entries=lambda w, q: [{"Id": "1", "ReceiptHandle": handle(w, q)}],
        ),
        "consume",
    ),
    row("DeleteQueue", on("delete_queue"), "admin"),
    row("GetQueueAttributes", on("get_queue_attributes", AttributeNames=["All"]), ANY),
    row("GetQueueUrl", lambda c, _, q: c.get_queue_url(QueueName=q), ANY),
    row("ListDeadLetterSourceQueues", on("list_dead_letter_source_queues"), ANY),
    row(
        "ListMessageMoveTasks",
        lambda c, _, q: c.list_message_move_tasks(SourceArn=arn(q)),
        "admin",
    ),
    row("ListQueueTags", on("list_queue_tags"), ANY),
    row("ListQueues", lambda c, *_: c.list_queues(), KNOWN),
    row("PurgeQueue", but(on("purge_queue"), "allowed every 60 seconds"), "admin"),
    row("ReceiveMessage", on("receive_message"), "consume"),
    row("RemovePermission", but(on("remove_permission", Label="l"), "find label"), "admin"),
    row("SendMessage", on("send_message", MessageBody="x"), "publish"),
    row(
        "SendMessage with an attribute that names another queue",
        on(
            "send_message",
            MessageBody="x",
            MessageAttributes=lambda _, q: {
                "queue": {"DataType": "String", "StringValue": other(q)}
            },
        ),
        "publish",
    ),
    row("SendMessageBatch", on("send_message_batch", Entries=[ENTRY]), "publish"),
    row(
        "SetQueueAttributes", on("set_queue_attributes", Attributes={"DelaySeconds": "0"}), "admin"
    ),
    row(
        "StartMessageMoveTask",
        but(
            lambda c, _, q: c.start_message_move_task(
                SourceArn=arn(q), DestinationArn=arn("other")
            ),
            NO_SOURCE,
        ),
        "admin",
        "publish:other|admin:other",
    ),
    row("TagQueue", on("tag_queue", Tags={"t": "v"}), "admin"),
    row("UntagQueue", on("untag_queue", TagKeys=["t"]), "admin"),
]


def test_sqs(world: World) -> None:
    def refused(error: Exception) -> bool:
        assert isinstance(error, ClientError), error
        return error.response["Error"]["Code"] in {
            "AccessDenied",
            "InvalidClientTokenId",
        }

    judge(world, SQS, lambda key: sqs_of(world, key), refused)


def test_every_sqs_operation_is_in_the_table() -> None:
    assert {each.verb.split()[0] for each in SQS} == set(OPERATIONS)


def test_sqs_lists_and_tells_only_of_queues_that_a_key_may_use(world: World) -> None:
    for key, grants in KEYS.items():
        if grants:
            urls = sqs_of(world, key).list_queues().get("QueueUrls", [])
            seen = {each.rpartition("/")[2] for each in urls} & {*QUEUES, "other"}
            actions = ("publish", "consume", "admin")
            may = {q for q in (*QUEUES, "other") if any(holds(key, a, q) for a in actions)}
            assert seen == may, key
    world.broker.create_queue("hidden", dead_letter="a", max_attempts=1)
    client = sqs_of(world, "admin-a")
    assert client.list_dead_letter_source_queues(QueueUrl=url(world, "a"))["queueUrls"] == []
    # Where messages would go back to is not told to who may not send there, nor whether there is
    # such a queue at all.
    errors = []
    tries = ({"SourceArn": arn("a")}, {"SourceArn": arn("a"), "DestinationArn": arn("hidden")})
    for given in (*tries, {"SourceArn": arn("hidden")}, {"SourceArn": arn("nowhere")}):
        with pytest.raises(ClientError) as caught:
            client.start_message_move_task(**given)
        errors.append(caught.value.response["Error"])
    assert {each["Code"] for each in errors} == {"AccessDenied"}
    assert "hidden" not in errors[0]["Message"]
    world.broker.delete_queue("hidden")


# --- Flight ---------------------------------------------------------------------------------------

ROWS = pa.schema([("payload", pa.binary()), ("queue", pa.string())])
BY_QUEUE = {"active", "done", "failed", "attempts", "groups"}
OF_ALL = {"log", "messages", "queues", "stats"}


def put(store: FlightStore, *queues: str | None) -> None:
    batch = pa.record_batch({"payload": [b"p"] * len(queues), "queue": queues}, schema=ROWS)
    store.publish([batch])


def spool_and(
    then: Callable[[FlightStore, str, str], Any],
) -> Callable[[FlightStore, World, str], None]:
    def run(store: FlightStore, _: World, queue: str) -> None:
        batch = pa.record_batch({"payload": [b"p"], "queue": [queue]}, schema=ROWS)
        name = f"spool-{next(BACKUPS)}"
        (part,) = store.spool(name, "part", [batch])
        then(store, name, part)

    return run


def table(name: str) -> Callable[[Any, World, str], Any]:
    return lambda s, _, q: s.read_table(name, queue=q)


FLIGHT = [
    row("PublishCommand", lambda s, _, q: put(s, q), "publish"),
    row("PublishCommand of two", lambda s, *_: put(s, "a", "b"), "publish:a", "publish:b"),
    row("publish_part", spool_and(lambda s, *spool: s.publish_part(*spool)), "publish"),
    row("drop_spool", spool_and(lambda s, name, _: s.drop_spool(name)), "publish"),
    row("PublishCommand to all", lambda s, *_: put(s, None), "publish:*"),
    row(
        "StageCommand",
        but(lambda s, *_: s.stage("s", [], log=0, begin=1, end=2), "inline"),
        "admin:*",
    ),
    row("FillCommand", lambda s, _, q: s.fill([], queue=q, begin=1, end=1), "admin:*"),
    *(row(f"table {name}", table(name), "consume|admin") for name in sorted(BY_QUEUE)),
    *(
        row(f"table {name}", but(table(name), "no queues to choose"), LOOK)
        for name in sorted(OF_ALL)
    ),
    row(
        "table of two",
        lambda s, *_: s.read_table("active", queue=["a", "b"]),
        "consume:a|admin:a",
        "consume:b|admin:b",
    ),
    row("table of all", lambda s, *_: s.read_table("active"), LOOK),
    row("LogTicket", lambda s, *_: list(s.read(LogTicket(0, 1, 2))), LOOK),
    row(
        "HistoryTicket",
        lambda s, _, q: list(s.read(HistoryTicket("done", [HistoryStretch(q, 0, "done", 0, 0)]))),
        "consume|admin",
    ),
    row("history_ends", lambda s, _, q: s.history_ends(q), "consume|admin"),
    row("history_ends of all", lambda s, *_: s.history_ends(), LOOK),
    row("history_ends of none", lambda s, *_: s.history_ends([]), LOOK),
    row("get_schema", lambda s, *_: s.schema("active"), KNOWN),
    row("info", lambda s, *_: s.info(), LOOK),
    row("check_read", lambda s, *_: s.check_read("active"), LOOK),
    row("hold_snapshot", lambda s, *_: s.hold_snapshot(), LOOK),
    row("drop_snapshot", lambda s, *_: s.drop_snapshot(s.hold_snapshot().snapshot), LOOK),
    row("log_stats", lambda s, *_: s.log_stats(), LOOK),
    row("route_plan", but(lambda s, *_: s.route_plan(), "inline"), LOOK),
    row("filters", lambda s, *_: s.filters(1), LOOK),
    row("take_epoch", lambda s, *_: s.take_epoch(), "admin:*"),
    row("commit_stages", but(lambda s, *_: s.commit_stages(["none"]), "none"), "admin:*"),
    row("drop_stages", lambda s, *_: s.drop_stages(["s"]), "admin:*"),
    row("backfill_plan", lambda s, _, q: s.backfill_plan(q), "consume|admin"),
    row("redrive", lambda s, _, q: s.redrive(q), "admin"),
    row("trim", lambda s, _, q: s.trim(q, state="done", before=1), "admin"),
    row("collect", lambda s, *_: s.collect([1]), "admin:*"),
    row("offset_at", lambda s, *_: s.offset_at(1), LOOK),
    row("sweep", lambda s, *_: s.sweep(), "admin:*"),
    row("stats", lambda s, *_: s.stats(), LOOK),
]


def test_flight(world: World) -> None:
    place = world.server.location("flight")
    judge(
        world,
        FLIGHT,
        lambda key: FlightStore(place, token=world.tokens[key]),
        # Flight's client does not tell what kind of error a schema could not be got for.
        lambda error: isinstance(error, NotAllowed) or str(error).startswith("NotAllowed: "),
    )


def test_every_flight_call_is_in_the_table(world: World) -> None:
    assert {*TABLES} == BY_QUEUE | OF_ALL
    options = fl.FlightCallOptions(
        headers=[(b"authorization", f"Bearer {world.tokens['root']}".encode())]
    )
    with fl.FlightClient(world.server.location("flight")) as client:
        actions = {each.type for each in client.list_actions(options)}
    told = {each.verb.split()[0] for each in FLIGHT} - {
        "table",
        "LogTicket",
        "get_schema",
        "HistoryTicket",
    }
    assert told == actions | {kind.__name__ for kind in get_args(PUTS)}
    # Methods that Flight calls; of the names of actions everybody may know who has a key.
    served = {name for name in vars(FlightService) if not name.startswith("_")}
    methods = {"get_flight_info", "get_schema", "do_get", "do_put", "do_action", "list_actions"}
    assert served == methods


def test_a_snapshot_is_read_by_what_its_key_may_now(world: World) -> None:
    store = FlightStore(world.server.location("flight"), token=world.tokens["consume-a"])
    ticket = store.plan_read("active", queue="a").tickets[0]
    list(store.read(ticket))
    assert world.server.keys is not None
    principal = world.server.keys.by_token(world.tokens["consume-a"])
    assert principal is not None
    granted, principal.grants = principal.grants, ()
    try:
        with pytest.raises(NotAllowed):
            list(store.read(ticket))
    finally:
        principal.grants = granted


# --- pages and Queueber ---------------------------------------------------------------------------


PAGES = [
    row("GET /health", lambda ask, *_: ask("GET", "/health"), EVERYBODY),
    row("GET /ready", lambda ask, *_: ask("GET", "/ready"), EVERYBODY),
    row("GET /metrics", lambda ask, *_: ask("GET", "/metrics"), LOOK),
    row(
        "POST /admin/backup",
        lambda ask, *_: ask("POST", "/admin/backup", b'{"name": "n%d"}' % next(BACKUPS)),
        "admin:*",
    ),
]


def test_pages(world: World) -> None:
    def asking(key: str) -> Callable[..., None]:
        def ask(method: str, path: str, body: bytes = b"") -> None:
            address = world.server.addresses["http"]
            status = ask_page(address, method, path, body=body, token=world.tokens[key]).status
            if status in {401, 403}:
                raise NotAllowed(path)
            assert status == 200

        return ask

    judge(world, PAGES, asking)
    assert {tuple(each.verb.split()) for each in PAGES} == set(operations.routes(world.server))


def test_queueber_has_no_keys_and_one_queue(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    add_key(path, "root", ["all"])
    with (
        pytest.raises(InvalidInput, match="know no login"),
        running("memory:", capnp="127.0.0.1:0", keys=path),
    ):
        pass
    path = Path(gateways.__path__[0]) / "queueber.capnp"
    methods: Any = capnp.load(str(path))
    assert set(methods.Queue.schema.method_names) == {"add", "poll", "remove", "extend"}


# --- receipts of another queue --------------------------------------------------------------------


def test_a_receipt_of_another_queue_changes_nothing(world: World) -> None:
    sqs = sqs_of(world, "consume-a")
    sent = handle(world, "b")
    acts: list[Callable[[], Any]] = [
        lambda: sqs.delete_message(QueueUrl=url(world, "a"), ReceiptHandle=sent),
        lambda: sqs.change_message_visibility(
            QueueUrl=url(world, "a"), ReceiptHandle=sent, VisibilityTimeout=0
        ),
    ]
    for act in acts:
        with pytest.raises(ClientError, match="ReceiptHandleIsInvalid"):
            act()
    place = world.server.location("native")
    with penstock.connect(place, token=world.tokens["consume-a"]) as client:
        mixed = world.claimed("a", "b")
        for verb in (client.ack, client.release, lambda each: client.extend(each, lease_ms=1)):
            with pytest.raises(NotAllowed) as caught:
                verb(mixed)
            assert "'b'" not in str(caught.value)
        # One that says the queue is another gets nowhere either: the lease is of that one.
        forged = mixed[1].replace(mixed[1].split("-")[2], mixed[0].split("-")[2])
        assert not client.ack([forged])[0]
        assert client.extend(forged.rpartition("-")[0], lease_ms=9_000) == [] or not any(
            client.extend(forged.rpartition("-")[0], lease_ms=9_000)
        )
    # Nothing of it was done, for neither: all or none.
    assert all(world.broker.ack(mixed))


@pytest.mark.parametrize("kind", ["indexed", "buckets", "sql"])
def test_every_store_knows_the_queues_of_receipts(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    stored = f"rocksdb:{tmp_path}/db?design={kind}"
    with ExitStack() as stack:
        if kind == "sql":
            postgres = request.getfixturevalue("postgres")
            name = postgres.create()
            stack.callback(postgres.drop, name)
            stored = postgres.url(name)
        broker = stack.enter_context(penstock.open(stored))
        for queue in QUEUES:
            broker.create_queue(queue)
            broker.send(queue, b"x")
        receipts = [broker.claim(queue)[0].receipt for queue in QUEUES]
        asked: list[str] = []
        assert len(broker.extending(receipts, 9_000, None, asked.append)(0)) == 2
        broker.extending(receipts[0].rpartition("-")[0], 9_000, None, asked.append)(0)
        assert sorted(asked) == ["a", "a", "b"]
        # Of a queue that is gone there is nothing to be asked, and nothing to be had.
        broker.delete_queue("b")
        asked.clear()
        outcomes = broker.extending(receipts, 9_000, None, asked.append)(0)
        assert (asked, bool(outcomes[1])) == (["a"], False)
