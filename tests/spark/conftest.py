"""One Spark session for all tests here, and a broker with a Flight server for each of them."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from tests.ports import free_ports
from tests.processes import processes

import penstock
from penstock.filters import Row, parse
from penstock.server import in_process_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from penstock.model import Value
    from penstock.server import FlightListener


# Read by every Python that the session starts: a note says how long a client waits for a server,
# which may take long to come back on a busy machine; without text it waits as it would.
# The location is patched when it is imported: Spark gives a Python ten seconds to start.
PATIENCE = """
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path


class Patient(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "penstock.flight.location":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        run = spec.loader.exec_module

        def patched(module):
            run(module)
            own = module.Location.patience_ms.fget

            def patience_ms(location):
                return int(Path({note!r}).read_text() or own(location))

            module.Location.patience_ms = property(patience_ms)

        spec.loader.exec_module = patched
        return spec


sys.meta_path.insert(0, Patient())
"""
LONG_MS = 600_000


@pytest.fixture(scope="session")
def new_port() -> Callable[[], int]:
    """Give a way to find a free port."""
    return lambda: free_ports(1)[0]


@pytest.fixture(scope="session")
def java() -> None:
    """Skip without Java; but not where the tests must be complete."""
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java") or (home and shutil.which("java", path=f"{home}/bin")):
        return
    if os.environ.get("CI") == "true":
        pytest.fail("Java is missing: Spark needs version 17 or 21")
    pytest.skip("Java is missing: Spark needs version 17 or 21")


@pytest.fixture(scope="session")
def patience(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the file that says how long Spark's Python waits for a broker that does not answer."""
    note = tmp_path_factory.mktemp("patience") / "patience"
    note.write_text(str(LONG_MS))
    return note


@pytest.fixture
def impatient(patience: Path) -> Iterator[None]:
    """Have Spark's Python give up on a broker that is not there at once."""
    patience.write_text("1")
    yield
    patience.write_text(str(LONG_MS))


@pytest.fixture
def as_patient_as_told(patience: Path) -> Iterator[None]:
    """Have Spark's Python wait for as long as the option ``retryFor`` says."""
    patience.write_text("")
    yield
    patience.write_text(str(LONG_MS))


@pytest.fixture(scope="session")
def spark(
    java: None, patience: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkSession]:
    """Give the session; a task is tried up to four times, as on a cluster."""
    from penstock.spark import session  # noqa: PLC0415 - pyspark may be missing

    place = tmp_path_factory.mktemp("spark")
    patience.with_name("sitecustomize.py").write_text(PATIENCE.format(note=str(patience)))
    known = os.environ.get("PYTHONPATH")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(patience.parent), known])))
        running = session(
            "local[2,4]",
            conf={
                "spark.local.dir": str(place / "local"),
                "spark.sql.warehouse.dir": str(place / "warehouse"),
                "spark.sql.shuffle.partitions": "2",
                "spark.log.level": "OFF",
                "spark.ui.enabled": "false",
                "spark.sql.adaptive.enabled": "false",
                # Compiling every plan takes longer than running it on a few rows.
                "spark.sql.codegen.wholeStage": "false",
                "spark.sql.codegen.factoryMode": "NO_CODEGEN",
            },
        )
    yield running
    running.stop()


class World:
    """A broker behind a Flight server, and what every queue of it ought to hold."""

    def __init__(
        self,
        path: Path,
        routing: str = "pipeline",
        clock: penstock.Clock | None = None,
        url: str | None = None,
        port: int = 0,
    ) -> None:
        self.path = path
        self.url = url or f"rocksdb:{path}"
        self.clock = clock
        self.routing = routing
        self.port = port
        self.published: dict[int, tuple[dict[str, Value], str, int, int]] = {}
        self._serving: FlightListener | None = None
        self.location = ""
        self.open()

    def open(self) -> None:
        """Open the store and serve it, at the port of the last time if there was one."""
        self.broker = penstock.open(
            self.url,
            durability="relaxed",
            routing=self.routing,  # type: ignore[arg-type]
            clock=self.clock,
        )
        self._serving = in_process_server(self.broker, port=self.port)
        self.location, self.port = self._serving.location, self._serving.port

    def close(self) -> None:
        """Stop the server and close the store."""
        if self._serving is not None:
            self._serving.close()
            self._serving = None
            self.broker.close()

    def publish(self, count: int) -> list[int]:
        """Publish messages of a few kinds; the sequence goes on over calls."""
        base = len(self.published)
        messages = [
            penstock.Message(
                b"m" * (number % 5),
                {"kind": f"k{number % 7}", "price": number % 50, "n": number},
                group=f"g{number % 3}",
                priority=number % 2,
            )
            for number in range(base, base + count)
        ]
        ids = []
        for begin in range(0, count, 10_000):
            part = messages[begin : begin + 10_000]
            ids += self.broker.publish(part)
        for message_id, message in zip(ids, messages, strict=True):
            self.published[message_id] = (
                dict(message.attributes),
                message.group,
                message.priority,
                len(message.payload),
            )
        return ids

    def content(self) -> dict[str, list[int]]:
        """Return the ids in every queue, whatever their state; one that is there twice, twice."""
        found: dict[str, list[int]] = {}
        for queue in self.broker.queues():
            found[queue.name] = []
            for state in penstock.State:
                cursor = None
                while True:
                    page = self.broker.browse(
                        queue.name, state=state, limit=10_000, cursor=cursor, payloads=False
                    )
                    found[queue.name] += [entry.message_id for entry in page]
                    cursor = page.next_cursor
                    if cursor is None:
                        break
            found[queue.name].sort()
        return found

    def naive(self, filters: dict[str, str] | None = None) -> dict[str, list[int]]:
        """Evaluate every filter on every message that was published."""
        if filters is None:
            filters = {queue.name: queue.filter for queue in self.broker.queues()}
        messages = sorted(self.published.items())
        parsed = {name: parse(text) for name, text in filters.items()}
        return {
            name: [
                message_id
                for message_id, (attributes, group, priority, size) in messages
                if one.matches(Row(attributes, group, priority, 0, size))
            ]
            for name, one in parsed.items()
        }

    def make_queues(self) -> None:
        """Make queues whose filters overlap, take everything, or take nothing."""
        for name, text in {
            "k1": "kind = 'k1'",
            "dear": "price > 40 AND kind IN ('k1', 'k2', 'k3')",
            "grouped": "\"group\" = 'g1' OR priority = 1 AND n < 100",
            "everything": "n >= 0",
            "nothing": "n < 0",
        }.items():
            self.broker.create_queue(name, filter=text)

    def reader(self, spark: SparkSession, table: str, **options: str) -> DataFrame:
        """Read a table in a batch."""
        return (
            spark.read.format("penstock")
            .options(location=self.location, table=table, **options)
            .load()
        )


@pytest.fixture(scope="session")
def world_type() -> type[World]:
    """Give the class, for fixtures that outlive a test."""
    return World


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Give a way to make brokers; they are closed afterwards."""
    made: list[World] = []

    def make(**settings: Any) -> World:
        made.append(World(tmp_path / f"store{len(made)}", **settings))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """Give a broker whose store is routed by a pipeline."""
    return make_world()


def python_workers(spark: SparkSession) -> list[int]:
    """Return the Python processes that run tasks now; not those that plan on the driver's side."""
    java = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
    running = processes()
    daemons = {
        pid
        for pid, (parent, command) in running.items()
        if parent == java and command.rstrip().endswith("pyspark.daemon pyspark.worker")
    }
    return [pid for pid, (parent, _) in running.items() if parent in daemons]


@pytest.fixture
def actions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give a list of the actions that brokers of this process are asked for over Flight."""
    from penstock.flight.service import FlightService  # noqa: PLC0415 - pyarrow may be missing

    asked: list[str] = []
    do_action = FlightService.do_action

    def noting(self: Any, context: Any, action: Any) -> Any:
        asked.append(action.type)
        return do_action(self, context, action)

    monkeypatch.setattr(FlightService, "do_action", noting)
    return asked


# --- a store with a history, for the jobs ---------------------------------------------------------


# Here and not in the folder of the jobs: pytest loses the fixtures of a folder within another if
# files of both are named in turns.
class Shop:
    """A store with two queues; every price that ends in 1 fails for good after two attempts."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.broker: penstock.Broker = world.broker
        self.location: str = world.location
        self.make("all", "n >= 0")
        self.make("dear", "price > 30")

    def make(self, name: str, text: str) -> None:
        self.broker.create_queue(
            name, filter=text, max_attempts=2, backoff_base_ms=0, backoff_cap_ms=0
        )

    def fill(self, count: int) -> None:
        """Publish, and work everything off."""
        self.world.publish(count)
        self.work()

    def work(self) -> None:
        for queue in ("all", "dear"):
            while batch := self.broker.claim(queue, limit=200, consumer="worker"):
                good = [each for each in batch if int(each.attributes["price"] or 0) % 10 != 1]
                bad = [each for each in batch if int(each.attributes["price"] or 0) % 10 == 1]
                if good:
                    self.broker.ack([each.receipt for each in good])
                if bad:
                    receipts = [each.receipt for each in bad]
                    self.broker.release(receipts, delay_ms=0, reason="out of stock")


@pytest.fixture
def shop(make_world: Callable[..., Any]) -> Shop:
    """Give a store with done, failed and waiting messages."""
    shop = Shop(make_world(routing="inline"))
    shop.fill(400)
    shop.world.publish(50)
    return shop
