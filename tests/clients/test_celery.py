"""Celery: real workers that do real tasks through kombu's SQS transport, with signatures on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.clients import tools
from tests.clients.process import eventually

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.clients.process import Served

pytestmark = pytest.mark.slow

# Sends what it is told on its input, one line each, and says the task's id.
SENDER = """
import json, sys
from celery_app import app
for line in sys.stdin:
    name, args, kwargs, options = json.loads(line)
    print(app.tasks["celery_app." + name].apply_async(args, kwargs, **options).id, flush=True)
"""
# Waits for the results of the tasks that it is told, and says them.
READER = """
import json, sys
from celery_app import app
for line in sys.stdin:
    result = app.AsyncResult(line.strip())
    value = result.get(timeout=120, interval=0.05, propagate=False)
    print(json.dumps([result.state, repr(value) if result.failed() else value]), flush=True)
"""


class Tasks:
    """The application, as its producers and workers see it: each is a process."""

    def __init__(self, served: Served, place: Path, prefix: str, **settings: str) -> None:
        if find_spec("celery") is None or find_spec("pycurl") is None:
            tools.missing("celery[sqs]")
        self.place = place
        (place / "results").mkdir(parents=True)
        self.environment = {
            **served.environment,
            **settings,
            "TASKS_PLACE": str(place),
            "TASKS_PREFIX": f"{prefix}-",
            "TASKS_SERVER": served.url.removeprefix("http://"),
            "PYTHONPATH": str(Path(__file__).parent),
        }
        # kombu is told by the broker's URL alone.
        self.environment.pop("AWS_ENDPOINT_URL")
        self.queue = f"{prefix}-tasks"

    def _run(self, program: str, lines: list[str]) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", program],
            input="".join(f"{line}\n" for line in lines),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def send(self, *calls: tuple[Any, ...]) -> list[str]:
        """Send tasks: name, arguments, keyword arguments and options."""
        whole = [[*call, *([], {}, {})[len(call) - 1 :]] for call in calls]
        ids = self._run(SENDER, [json.dumps(each) for each in whole])
        assert len(ids) == len(calls)
        return ids

    def results(self, ids: list[str]) -> list[Any]:
        """Wait for the results; of each, the state and the value."""
        return [json.loads(line) for line in self._run(READER, ids)]

    def lines(self, name: str) -> list[str]:
        path = self.place / name
        return path.read_text().splitlines() if path.exists() else []

    @contextmanager
    def worker(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a worker, in a process group of its own, until it is stopped or killed."""
        log = self.place / f"worker-{len(list(self.place.glob('worker-*')))}"
        command = [sys.executable, "-m", "celery", "-A", "celery_app", "worker"]
        command += ["--loglevel", "INFO", "--without-gossip", "--without-mingle", *options]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.place,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            eventually(lambda: b" ready." in log.read_bytes(), f"the worker of {log}", 180)
            yield process
            if process.poll() is None:
                process.terminate()
                process.wait(120)
        finally:
            kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker with all its children, at once."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def left(served: Served, queue: str) -> tuple[int, int, int]:
    """Return how many messages a queue has: available, held and delayed."""
    sqs = served.sqs()
    url = sqs.get_queue_url(QueueName=queue)["QueueUrl"]
    names = ("", "NotVisible", "Delayed")
    found = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    available, held, delayed = (int(found[f"ApproximateNumberOfMessages{each}"]) for each in names)
    return available, held, delayed


def test_a_worker_does_all_kinds_of_tasks(served: Served, tmp_path: Path) -> None:
    tasks = Tasks(served, tmp_path / "tasks", "kinds")
    began = time.time()  # noqa: TID251 - compared with the time of another process
    ids = tasks.send(
        *(("add", [number, number]) for number in range(20)),
        ("describe", ["söme <text> & more"], {"details": {"list": [1, None, "x"], "big": 2**40}}),
        ("stubborn", ["tries", 2]),
        ("when", [], {}, {"countdown": 2}),
        ("broken",),
    )
    with tasks.worker("--pool", "solo"):
        results = tasks.results(ids)
        eventually(lambda: left(served, tasks.queue) == (0, 0, 0), "the queue to be empty")
    assert results[:20] == [["SUCCESS", 2 * number] for number in range(20)]
    details = {"list": [1, None, "x"], "big": 2**40}
    assert results[20] == ["SUCCESS", ["söme <text> & more", details]]
    assert results[21] == ["SUCCESS", 2]
    assert tasks.lines("tries") == ["0", "1", "2"]
    state, at = results[22]
    assert state == "SUCCESS"
    assert at >= began + 2
    assert results[23] == ["FAILURE", "ValueError('broken on purpose')"]


def test_a_killed_workers_tasks_are_done_by_another(served: Served, tmp_path: Path) -> None:
    settings = {"TASKS_VISIBILITY_S": "6", "TASKS_PREFETCH": "4"}
    tasks = Tasks(served, tmp_path / "tasks", "killed", **settings)
    ids = tasks.send(("slow", [0, 600]), *(("slow", [number, 0.01]) for number in range(1, 31)))
    with tasks.worker("--pool", "prefork", "--concurrency", "1") as worker:
        eventually(lambda: numbers(tasks, "began").count(0), "the long task to begin")
        # It works on one and has fetched others; how long it has held them is of no account.
        with penstock.connect(served.native, token=served.token) as client:
            eventually(lambda: client.stats(tasks.queue).claimed_total > 1, "tasks to be held")
        kill(worker)
    assert 0 not in numbers(tasks, "done")
    tasks.environment["TASKS_HURRY"] = "1"
    with tasks.worker("--pool", "prefork", "--concurrency", "2"):
        results = tasks.results(ids)
        eventually(lambda: left(served, tasks.queue) == (0, 0, 0), "the queue to be empty")
    assert results == [["SUCCESS", number] for number in range(31)]
    assert sorted(set(numbers(tasks, "done"))) == list(range(31))
    pids = {line.split()[1] for line in tasks.lines("began") if line.split()[0] == "0"}
    assert len(pids) > 1, "begun by the worker that was killed, and by another"


def numbers(tasks: Tasks, name: str) -> list[int]:
    """Return the tasks that a file tells of."""
    return [int(line.split()[0]) for line in tasks.lines(name)]
