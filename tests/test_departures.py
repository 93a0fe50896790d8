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
import os, sys, threading, penstock

broker = penstock.open(sys.argv[1])
broker.create_queue("q")
broker.send("q", b"1")
# A thread that is not in the child holds the lock.
with broker._runner._lock:
    child = os.fork()
if not child:
    refused = 0
    for act in (
        lambda: broker.claim("q", wait_ms=1000),
        lambda: broker.send("q", b"2"),
        lambda: broker.stats("q"),
        lambda: broker.sweep(),
    ):
        try:
            act()
        except penstock.BrokerClosed as error:
            refused += "fork()" in str(error)
    broker.close()
    os._exit(40 + refused)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 44, status
broker.send("q", b"3")
assert len(broker.claim("q", limit=5)) == 2
assert not broker.check().found
broker.close()
"""


@pytest.mark.parametrize("scheme", ["rocksdb:", "slatedb+file://"])
def test_a_broker_is_not_for_the_children_of_its_process(scheme: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS, f"{scheme}{tmp_path / 'store'}"],
        timeout=120,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
