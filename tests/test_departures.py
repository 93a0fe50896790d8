"""Callers of a broker in their own process who go away: by an interrupt, or by ``fork()``."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import penstock
from penstock.errors import StorageFailed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.sql.postgres import PostgresServer

    from penstock import Broker


@pytest.fixture(params=["indexed", "buckets"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    url = f"rocksdb:{tmp_path / 'store'}?design={request.param}"
    with penstock.open(url) as opened:
        opened.create_queue("q", max_attempts=1, ordering="fifo")
        for payload in (b"1", b"2"):
            opened.send("q", payload)
        yield opened


@pytest.mark.parametrize("error", [KeyboardInterrupt, StorageFailed])
def test_a_claim_that_ends_before_it_returns_is_given_back(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def interrupted(_number: int) -> None:
        patch.undo()
        raise error

    for wait_ms in (0, 1000) * 3:
        with monkeypatch.context() as patch:
            patch.setattr(broker._runner._committer, "wait", interrupted)
            with pytest.raises(error):
                broker.claim("q", wait_ms=wait_ms)
    assert broker.stats("q").in_flight == 0
    (delivery,) = broker.claim("q")
    assert (delivery.payload, delivery.attempts) == (b"1", 1)


FORKS = """
import os, signal, sys, penstock

url = sys.argv[1]
broker = penstock.open(url)
broker.create_queue("q")
for payload in (b"1", b"2", b"3"):
    broker.send("q", payload)
consumer = broker.consume("q", wait_ms=0)
held = [next(consumer) for _ in range(3)]
held[0].ack().result()
# Threads that are not in the child hold the locks.
runner, settler = broker._runner, consumer.settler
with runner._lock, runner._outage_lock, consumer._claiming:
    pending = held[1].ack()
    with settler._lock:
        child = os.fork()
if not child:
    # A child that hangs is killed.
    signal.alarm(60)
    acts = [
        lambda: broker.claim("q", wait_ms=1000),
        lambda: broker.send("q", b"4"),
        lambda: broker.stats("q"),
        lambda: broker.sweep(),
        lambda: held[2].ack().result(),
        lambda: held[2].extend(lease_ms=1),
        lambda: pending.result(),
        lambda: next(consumer),
    ]
    if url.startswith(("rocksdb", "slatedb")):
        acts.append(lambda: penstock.open(url + "-2"))
    refused = 0
    for act in acts:
        try:
            act()
        except (penstock.BrokerClosed, penstock.StorageFailed) as error:
            refused += "fork()" in str(error)
    consumer.flush()
    consumer.close()
    broker.close()
    # In order, as workers of gunicorn end: what the child has of the store goes.
    sys.exit(40 + len(acts) - refused)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 40, status
assert [each.ack().result().status for each in held[2:]] == ["done"]
assert pending.result().status == "done"
broker.send("q", b"5")
assert [each.payload for each in broker.claim("q", limit=5)] == [b"5"]
assert not broker.check().found
broker.close()
"""


def run_forks(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS, url],
        timeout=120,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("scheme", ["memory:", "rocksdb:{}", "slatedb+file://{}"])
def test_a_broker_is_not_for_the_children_of_its_process(scheme: str, tmp_path: Path) -> None:
    run_forks(scheme.format(tmp_path / "store"))


def test_a_broker_on_postgresql_is_not_for_the_children_of_its_process(
    postgres: PostgresServer,
) -> None:
    name = postgres.create()
    run_forks(postgres.url(name))
    postgres.drop(name)
