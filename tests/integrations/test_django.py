"""Django's tasks in Penstock: a site with a real database, a real server and real workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import django
import pytest
from django.apps import apps
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.test import override_settings
from django.utils import timezone
from tests.ports import free_ports
from tests.waiting import wait_until

import penstock
from penstock.server import running

try:
    from django.tasks import default_task_backend
    from django.tasks.exceptions import TaskResultDoesNotExist, TaskResultMismatch
except ModuleNotFoundError:
    from django_tasks import default_task_backend
    from django_tasks.exceptions import TaskResultDoesNotExist, TaskResultMismatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.client import Client

SITE = Path(__file__).parent / "site"
pytestmark = pytest.mark.xdist_group("django")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a store, and set the site up on it."""
    place = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch, running("memory:", native="127.0.0.1:0") as server:
        patch.setenv("SHOP_DATABASE", str(place / "shop.sqlite"))
        patch.setenv("SHOP_URL", server.location("native"))
        patch.setenv("SHOP_OPTIONS", "{}")
        patch.setenv("DJANGO_SETTINGS_MODULE", "shop.settings")
        patch.syspath_prepend(str(SITE))
        django.setup()

        call_command("migrate", verbosity=0)
        yield server.location("native")
        connections.close_all()


@pytest.fixture
def tasks(url: str) -> Any:
    return import_module("shop.tasks")


@pytest.fixture
def records(url: str) -> Any:
    return apps.get_model("penstock", "TaskRecord").objects


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with penstock.connect(url) as connected:
        yield connected


@contextmanager
def options(**changes: Any) -> Iterator[None]:
    """Change the options of the backend, here and in workers that are started here."""

    backend = settings.TASKS["default"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOP_OPTIONS", json.dumps(changes))
        together = {**backend, "OPTIONS": {**backend["OPTIONS"], **changes}}
        with override_settings(TASKS={"default": together}):
            yield


@contextmanager
def working(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a worker of the site, in a process of its own."""
    source = str(Path(penstock.__file__).parents[1])
    worker = subprocess.Popen(
        [sys.executable, "manage.py", "penstock_worker", *arguments],
        cwd=SITE,
        env={**os.environ, "PYTHONPATH": source},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield worker
    finally:
        worker.terminate()
        _, said = worker.communicate(timeout=60)
        sys.stderr.write(said)  # pytest shows it if the test fails


@pytest.fixture(scope="module")
def worker(url: str) -> Iterator[subprocess.Popen[str]]:
    with working() as started:
        yield started


def finished(result: Any) -> Any:
    """Wait for the end of a task."""

    def ended() -> bool:
        result.refresh()
        return bool(result.is_finished)

    wait_until(ended, why="the task has not finished")
    return result


# --- tasks and results ----------------------------------------------------------------------------


def test_a_task_returns_its_value(tasks: Any, worker: Any, client: Client) -> None:

    result = tasks.add.enqueue(1, second=2)
    assert (result.status, result.args, result.kwargs) == ("READY", [1], {"second": 2})
    found = tasks.add.get_result(finished(result).id)
    assert found.return_value == 3
    assert found.enqueued_at < found.started_at <= found.last_attempted_at < found.finished_at
    assert (found.attempts, found.errors) == (1, [])
    assert found.worker_ids[0].endswith(f"-{worker.pid}")

    def done() -> list[penstock.Entry]:
        page = client.browse("default", state="done")
        return [each for each in page if each.payload == found.id.encode()]

    # The worker acks after it has noted the result.
    wait_until(done)
    [entry] = done()
    [attempt] = client.attempts("default", entry.message_id)
    assert [attempt.consumer] == found.worker_ids
    assert entry.attributes == {"queue": "default", "task": "shop.tasks.add"}


def test_a_task_that_raises_fails_and_is_not_tried_again(
    tasks: Any, worker: Any, client: Client, tmp_path: Path
) -> None:

    result = finished(tasks.fail.enqueue(str(tmp_path / "runs")))
    assert result.status == "FAILED"
    [error] = result.errors
    assert error.exception_class is ZeroDivisionError
    assert "in fail\n" in error.traceback
    with pytest.raises(ValueError, match="failed"):
        _ = result.return_value
    wait_until(lambda: client.stats("default").failed == 1)
    assert (tmp_path / "runs").read_text() == "begun\n"

    # Unless somebody asks for it.
    assert client.redrive("default") == 1
    wait_until(lambda: tasks.fail.get_result(result.id).attempts == 2)
    assert [each.exception_class for each in finished(result).errors] == [ZeroDivisionError] * 2


def test_coroutines_enqueue_and_are_awaited(tasks: Any, worker: Any) -> None:

    async def use() -> tuple[Any, Any]:
        result = await tasks.sleepily.aenqueue()
        while not result.is_finished:
            await asyncio.sleep(0.01)
            await result.arefresh()
        return result, await tasks.sleepily.aget_result(result.id)

    result, found = asyncio.run(use())
    assert result.return_value == found.return_value == "awake"


def test_a_result_belongs_to_its_task(tasks: Any, worker: Any) -> None:

    result = tasks.greet.enqueue("Ada", mood=["good"])
    assert finished(result).return_value == {"hello": "Ada", "mood": ["good"]}
    with pytest.raises(TaskResultMismatch):
        tasks.add.get_result(result.id)
    with pytest.raises(TaskResultDoesNotExist):
        tasks.add.get_result("unheard-of")


def test_connections_are_closed_around_a_task(tasks: Any, worker: Any) -> None:

    for _ in range(5):  # more than there are threads
        assert finished(tasks.connect.enqueue()).return_value == worker.pid


def test_what_is_no_json_is_refused(tasks: Any) -> None:

    with pytest.raises(TypeError, match="Unsupported type"):
        tasks.add.enqueue(object(), 1)


# --- messages -------------------------------------------------------------------------------------


def test_priority_queue_and_time_are_the_messages(tasks: Any, client: Client) -> None:

    with options(prefix="order-"):
        tasks.add.enqueue(1, 1)
        tasks.add.using(priority=-100).enqueue(1, 1)
        tasks.add.using(priority=100).enqueue(1, 1)
        tasks.greet.enqueue("Ada")
        later = timezone.now() + timedelta(days=400)
        tasks.greet.using(run_after=later).enqueue("Ada")
    claimed = client.claim("order-default", limit=10)
    assert [each.priority for each in claimed] == [200, 100, 0]
    assert client.queue("order-default").max_attempts == 1
    [now] = client.browse("order-mail")
    [delayed] = client.browse("order-mail", state="delayed")
    assert now.priority == delayed.priority == 110
    assert abs((delayed.visible_at_ms or 0) - later.timestamp() * 1000) < 60_000


def test_a_task_is_published_when_its_transaction_commits(tasks: Any, client: Client) -> None:

    with options(prefix="commit-"):
        tasks.add.get_backend().prepare("default")
        with transaction.atomic():
            kept = tasks.add.enqueue(1, 1)
            assert client.stats("commit-default").available == 0
        [message] = client.browse("commit-default")
        assert message.payload == kept.id.encode()
        with transaction.atomic():
            undone = tasks.add.enqueue(1, 1)
            transaction.set_rollback(True)
        assert client.stats("commit-default").available == 1
        with pytest.raises(TaskResultDoesNotExist):
            tasks.add.get_result(undone.id)


def test_a_task_is_published_late_if_penstock_was_away(
    tasks: Any, records: Any, client: Client
) -> None:

    away = f"penstock://127.0.0.1:{free_ports(1)[0]}"
    with options(url=away, patience_ms=50, prefix="late-"):
        result = tasks.add.enqueue(20, 3)
        assert tasks.add.get_result(result.id).status == "READY"
    with options(prefix="late-"):
        backend = tasks.add.get_backend()
        assert backend.publish_late() == 0  # its own process may still do it
        early = result.enqueued_at - timedelta(minutes=2)
        records.filter(id=result.id).update(enqueued_at=early)
        with working():
            assert finished(result).return_value == 23
        assert backend.publish_late() == 0
        assert client.stats("late-default").done == 1


# --- workers --------------------------------------------------------------------------------------


def test_a_task_runs_again_after_the_lease_of_a_killed_worker(tasks: Any, tmp_path: Path) -> None:

    path = tmp_path / "runs"
    again = {"max_attempts": 2, "lease_ms": 1_000, "backoff_base_ms": 1}
    with options(prefix="again-", queue=again):
        result = tasks.attempt.enqueue(str(path), 1)
        with working() as first:
            wait_until(lambda: path.exists() and path.read_text())
            assert tasks.attempt.get_result(result.id).status == "RUNNING"
            first.kill()
            first.wait()
        wait_until(lambda: tasks.attempt.get_result(result.id).status == "READY")
        with working() as second:
            assert finished(result).return_value == [2, 2]
        assert [each.rpartition("-")[2] for each in result.worker_ids] == [
            str(first.pid),
            str(second.pid),
        ]
    assert path.read_text() == "begun\n" * 2


def test_a_task_fails_if_its_worker_died_at_the_last_attempt(
    tasks: Any, client: Client, tmp_path: Path
) -> None:

    with (
        options(prefix="once-", queue={"lease_ms": 1_000}),
        working("--processes", "--concurrency", "1") as worker,
    ):
        died = finished(tasks.die.enqueue())
        assert finished(tasks.add.enqueue(3, 4)).return_value == 7
        lost = tasks.attempt.enqueue(str(tmp_path / "runs"), 1)
        behind = tasks.add.enqueue(1, 1)
        wait_until((tmp_path / "runs").exists)
        worker.kill()
        worker.wait()
        assert [finished(each).status for each in (died, lost)] == ["FAILED", "FAILED"]
        [left] = client.browse("once-default")  # nothing is claimed ahead
        assert left.payload == behind.id.encode()
    for each in (died, lost):
        [error] = each.errors
        assert error.exception_class.__name__ == "WorkerLost"
        assert each.attempts == 1
    assert "exit" in died.errors[0].traceback
    assert "the lease of" in lost.errors[0].traceback


def test_a_worker_that_stops_lets_its_task_finish(tasks: Any, tmp_path: Path) -> None:

    begun, told = tmp_path / "begun", tmp_path / "told"
    with options(prefix="stop-"), working("--queue", "default", "--concurrency", "1") as worker:
        result = tasks.finish_when_told.enqueue(str(begun), str(told))
        behind = tasks.add.enqueue(1, 1)
        wait_until(begun.exists)
        worker.send_signal(signal.SIGTERM)
        told.touch()
        assert worker.wait(60) == 0
        assert finished(result).return_value == "finished"
        assert tasks.add.get_result(behind.id).status == "READY"


def test_a_task_that_succeeded_is_not_run_again(tasks: Any, records: Any, tmp_path: Path) -> None:

    run_task = import_module("penstock.integrations.django.backend").run_task
    path = tmp_path / "runs"
    with options(url=f"rocksdb:{tmp_path}/store", queue={"max_attempts": 9, "backoff_base_ms": 1}):
        broker = tasks.attempt.get_backend().broker
        result = tasks.attempt.enqueue(str(path), 0)
        for _ in range(2):
            [delivery] = broker.claim("default", wait_ms=10_000)
            run_task(delivery, worker_id="here")
            broker.release([delivery.receipt], delay_ms=0)
        assert finished(result).return_value == [1, 1]
        assert path.read_text() == "begun\n"

        records.filter(id=result.id).update(status="READY", task="shop.tasks.note")
        [delivery] = broker.claim("default", wait_ms=10_000)
        with pytest.raises(TypeError, match="no task"):
            run_task(delivery, worker_id="here")
        records.filter(id=result.id).delete()
        with pytest.raises(LookupError, match="deleted"):
            run_task(delivery, worker_id="here")
        broker.close()


def test_an_error_that_is_recorded_just_now_is_no_lost_worker(
    tasks: Any, records: Any, client: Client, tmp_path: Path
) -> None:
    run_task = import_module("penstock.integrations.django.backend").run_task
    with options(prefix="now-"):
        result = tasks.fail.enqueue(str(tmp_path / "runs"))
        seen = records.get(id=result.id)
        [delivery] = client.claim("now-default")
        with pytest.raises(ZeroDivisionError):
            run_task(delivery, worker_id="here")
        client.release([delivery.receipt])
        tasks.fail.get_backend()._look_for_worker(seen)
    [error] = seen.result().errors
    assert error.exception_class is ZeroDivisionError


def test_old_records_are_deleted(tasks: Any, records: Any) -> None:

    with options(prefix="old-", keep_days=3):
        waiting, old, new = (tasks.add.enqueue(1, 1) for _ in range(3))
        for each, days in ((old, 4), (new, 2)):
            record = records.filter(id=each.id)
            record.update(finished_at=each.enqueued_at - timedelta(days=days))
        assert tasks.add.get_backend().prune() == 1
        assert set(records.values_list("id", flat=True)) >= {waiting.id, new.id}


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "found", "text"),
    [
        ({}, [], ""),
        ({"url": ""}, ["penstock.E003"], "the URL of Penstock is missing"),
        ({"url": "rocksdb:"}, ["penstock.E004"], "needs a directory"),
        ({"ulr": "x"}, ["penstock.E002"], "no option 'ulr'"),
        ({"queue": {"max_attempts": 0}}, ["penstock.E004"], "max_attempts"),
        ({"prefix": "#"}, ["penstock.E004"], "queue name '#"),
        ({"url": "penstock://127.0.0.1:1"}, ["penstock.W001"], "127.0.0.1:1"),
    ],
)
def test_settings_are_checked(
    url: str, changes: dict[str, Any], found: list[str], text: str
) -> None:

    with options(**changes):
        issues = list(default_task_backend.check())
    assert [issue.id for issue in issues] == found
    assert all(text in issue.msg for issue in issues)


def test_the_app_must_be_installed(url: str) -> None:

    with override_settings(INSTALLED_APPS=settings.FRAMEWORK):
        assert [issue.id for issue in default_task_backend.check()] == ["penstock.E001"]


def test_the_worker_names_what_it_can_not_use(url: str) -> None:

    with (
        options(url="penstock://127.0.0.1:1", patience_ms=50),
        pytest.raises(CommandError, match=r"127\.0\.0\.1:1"),
    ):
        call_command("penstock_worker", stdout=StringIO(), stderr=StringIO())


def test_the_migration_has_the_whole_model(url: str) -> None:

    call_command("makemigrations", "--check", "--dry-run", verbosity=0)
