"""A native publish takes few Python calls: every layer between client and store costs some."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import penstock
from penstock.model import Message
from penstock.server import running

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = os.path.dirname(penstock.__file__) + os.sep  # noqa: PTH120 - compared with code objects
EDGE = ("client", "server", "wire", "validation.py")
MOST_CALLS = 115
MOST_EDGE_CALLS = 49


@contextmanager
def traced(calls: list[str], tracing: threading.Event) -> Iterator[None]:
    """Count the calls of Penstock's functions on every thread that is begun inside."""

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and tracing.is_set():
            name = frame.f_code.co_filename
            if name.startswith(ROOT):
                calls.append(name.removeprefix(ROOT))

    before = sys.getprofile()
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def test_a_native_publish_takes_few_calls() -> None:
    calls: list[str] = []
    tracing = threading.Event()
    counts = []
    with (
        traced(calls, tracing),
        running("memory:", native="127.0.0.1:0") as server,
        penstock.connect(server.location("native")) as client,
    ):
        client.create_queue("q")
        for _ in range(6):
            calls.clear()
            tracing.set()
            client.publish([Message(b"x", {"queue": "q"})])
            # By the answer to this, the server is through with the one before.
            tracing.clear()
            client.ping()
            edge = sum(name.startswith(EDGE) for name in calls)
            counts.append((len(calls), edge, Counter(calls)))
    # The first ones make what the others share, and a tick may fall into any of them.
    every, edge, by_file = min(counts, key=lambda each: each[0])
    assert every <= MOST_CALLS, by_file
    assert edge <= MOST_EDGE_CALLS, by_file
