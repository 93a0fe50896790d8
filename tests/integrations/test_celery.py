"""Celery through the kombu transport: real workers do real tasks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.clients import tools
from tests.ports import free_ports
from tests.waiting import wait_until

import penstock
from penstock.server import running

if TYPE_CHECKING:
    from collections.abc import Iterator

if find_spec("celery") is None:
    tools.missing("celery")

from kombu import pools
from tests.integrations.kombu_app import PREFIX, make_app

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
QUEUE = f"{PREFIX}celery"


class Shop:
    """The application with a server of its own, which can be restarted in its place."""

    def __init__(self, place: Path) -> None:
        (place / "results").mkdir(parents=True)
        self.place = place
        (self.port,) = free_ports(1)
        self.url = f"penstock://127.0.0.1:{self.port}"
        self.app = make_app(self.url, place)

    def serving(self) -> Any:
        return running(f"rocksdb:{self.place}/db", native=f"127.0.0.1:{self.port}")

    def send(self, name: str, *args: object, **options: Any) -> Any:
        return self.app.tasks[name].apply_async(args, **options)

    def lines(self, name: str) -> list[str]:
        path = self.place / name
        return path.read_text().splitlines() if path.exists() else []

    def command(self, *options: str) -> list[str]:
        return [sys.executable, "-m", "celery", "-A", "tests.integrations.kombu_app", *options]

    def environment(self, **settings: str) -> dict[str, str]:
        own = {"TASKS_URL": self.url, "TASKS_PLACE": str(self.place)}
        return {**os.environ, **own, **settings, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}

    @contextmanager
    def worker(self, *options: str, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a worker, in a process group of its own, until it is stopped or killed."""
        log = self.place / f"worker-{len(list(self.place.glob('worker-*')))}"
        with log.open("wb") as file:
            process = subprocess.Popen(
                self.command("worker", "--loglevel", "INFO", *options),
                env=self.environment(**settings),
                cwd=self.place,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            wait_until(lambda: b" ready." in log.read_bytes(), 60, f"the worker of {log}")
            yield process
            if process.poll() is None:
                process.terminate()
                process.wait(60)
                assert b": CRITICAL" not in log.read_bytes(), log.read_text()
        finally:
            kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker with all its children, at once."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    # Other modules of this process may have clients open.
    before = set(threading.enumerate())
    made = Shop(tmp_path / "shop")
    yield made
    made.app.close()
    # Celery leaves its connections in kombu's pools.
    pools.reset()
    left = set(threading.enumerate()) - before
    assert "penstock-client" not in {each.name for each in left}


def test_a_worker_does_all_kinds_of_tasks(shop: Shop) -> None:
    with shop.serving(), penstock.connect(shop.url) as client:
        sums = [shop.send("add", number, number) for number in range(20)]
        stubborn = shop.send("stubborn", 2, headers={"penstock_dedup_id": "once"})
        again = shop.send("stubborn", 2, headers={"penstock_dedup_id": "once"})
        broken = shop.send("broken")
        shop.send("refuse")
        far = shop.send("add", 1, 1, countdown=400 * 86_400)
        with shop.worker("--concurrency", "2"):
            soon = shop.send("add", 2, 2, countdown=0.5)
            assert [each.get(timeout=30) for each in sums] == [2 * each for each in range(20)]
            assert soon.get(timeout=30) == 4
            assert stubborn.get(timeout=30) == 2
            assert isinstance(broken.get(timeout=30, propagate=False), ValueError)
            wait_until(lambda: len(shop.lines("refuse")) == 2)
            inspect = shop.app.control.inspect(timeout=30, limit=1)
            ((_, pong),) = inspect.ping().items()
            assert pong == {"ok": "pong"}
            ((_, consumed),) = inspect.active_queues().items()
            assert [each["name"] for each in consumed] == ["celery"]
            wait_until(lambda: client.stats(QUEUE).in_flight == 0)
        # The repetition was published, and dropped; its retries were not.
        assert shop.lines("stubborn") == ["0", "1", "2"]
        assert not again.ready()
        assert shop.lines("refuse") == ["False", "True"]
        # The task of next year waits in its queue, and no worker has held it.
        (entry,) = client.browse(QUEUE, state="delayed")
        assert entry.attributes["id"] == far.id
        assert (entry.visible_at_ms or 0) - entry.published_at_ms == pytest.approx(
            400 * 86_400_000, abs=60_000
        )
        # Remote control and events leave no queues behind.
        assert {spec.name for spec in client.queues()} == {QUEUE, "kombu.transient"}


def test_urgent_tasks_go_first_and_tenants_take_turns(shop: Shop) -> None:
    with shop.serving():
        for number in range(12):
            shop.send("order", f"big {number}", headers={"penstock_group": "big"})
        for number in range(3):
            shop.send("order", f"small {number}", headers={"penstock_group": "small"})
        shop.send("order", "urgent", headers={"penstock_group": "big"}, priority=9)
        with shop.worker("--pool", "solo", "--without-mingle", TASKS_PREFETCH="1"):
            wait_until(lambda: len(shop.lines("order")) == 16)
    order = shop.lines("order")
    assert order[0] in {"urgent", "small 0"}
    assert order.index("urgent") < order.index("big 0")
    # Of the first tasks every other one is the small tenant's.
    assert [order.index(f"small {number}") // 2 for number in range(3)] == [0, 1, 2]


def test_a_killed_workers_tasks_come_back_and_a_restarted_server_loses_none(shop: Shop) -> None:
    with ExitStack() as workers:
        with shop.serving():
            tasks = [shop.send("hold", number) for number in range(4)]
            with shop.worker(
                "--concurrency", "1", "--without-mingle", TASKS_VISIBILITY_S="2"
            ) as worker:
                wait_until(lambda: shop.lines("began"))
                kill(worker)
            assert not shop.lines("done")
            options = ("--pool", "threads", "--concurrency", "4", "--without-mingle")
            workers.enter_context(shop.worker(*options))
            wait_until(lambda: len(shop.lines("began")) == 5)
        # The server stops while the worker runs four tasks and waits for others.
        (shop.place / "let-go").touch()
        wait_until(lambda: len(shop.lines("done")) == 4)
        with shop.serving(), penstock.connect(shop.url) as client:
            assert shop.send("add", 1, 1).get(timeout=30) == 2
            assert [each.get(timeout=30) for each in tasks] == [0, 1, 2, 3]
            wait_until(lambda: client.stats(QUEUE).done == 5)
            workers.close()
            # The leases of the killed worker have ended, and none of the other's.
            assert client.stats(QUEUE).lease_expired_total == 4
    assert sorted(shop.lines("done")) == ["0", "1", "2", "3"]
