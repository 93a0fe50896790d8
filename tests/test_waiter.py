"""Waits of threads: woken, in time, and none for ever."""

from __future__ import annotations

import threading
from queue import Empty

import pytest

from penstock.waiter import Inbox, Waiter


def test_a_wait_ends_though_its_time_is_over_before_it_begins() -> None:
    def wait() -> None:
        for _ in range(50_000):
            assert not Waiter().wait(1e-9)

    waits = threading.Thread(target=wait, daemon=True)
    waits.start()
    waits.join(60)
    assert not waits.is_alive()


def test_a_wake_counts_once_whenever_it_comes() -> None:
    waiter = Waiter()
    waiter.wake()
    waiter.wake()
    assert waiter.wait(0)
    assert not waiter.wait(0)
    threading.Timer(0.01, waiter.wake).start()
    assert waiter.wait(60)
    waiter.wake()
    waiter.clear()
    assert not waiter.wait(0)


def test_what_is_put_into_an_inbox_is_taken_in_order() -> None:
    inbox: Inbox[int] = Inbox()
    inbox.put(1)
    inbox.put(2)
    assert [inbox.take(), inbox.take(0)] == [1, 2]
    # Both were taken by one wake: another is left over.
    with pytest.raises(Empty):
        inbox.take(0.01)
    threading.Timer(0.01, inbox.put, [3]).start()
    assert inbox.take() == 3
