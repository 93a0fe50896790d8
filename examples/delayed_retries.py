"""From a delay to a redrive: everything that can happen to a message that will not succeed.

A newsletter is to go out in an hour. The mail server is down when it is due: the queue backs off,
longer after every attempt, and puts the message aside when its attempts are used up. Nothing is
lost: the history says what happened, and once the server is back the message is redriven.

The clock is one that we move by hand, so the hours pass in no time.

    python examples/delayed_retries.py
"""

from __future__ import annotations

import tempfile

import penstock
from penstock import Broker, ManualClock, Message

HOUR_MS = 3_600_000


def deliver(broker: Broker, *, server_is_up: bool) -> bool:
    """Do what a worker does, once; say whether there was anything to do."""
    for delivery in broker.claim("mail", consumer="mailer-1"):
        if server_is_up:
            broker.ack([delivery.receipt])
            print(f"    attempt {delivery.attempts}: delivered")
        else:
            (outcome,) = broker.release([delivery.receipt], reason="connection refused")
            print(f"    attempt {delivery.attempts}: connection refused, so it is {outcome.status}")
        return True
    return False


def main() -> None:
    clock = ManualClock()
    with (
        tempfile.TemporaryDirectory() as directory,
        penstock.open(f"rocksdb:{directory}", clock=clock, background=False) as broker,
    ):
        broker.create_queue("mail", max_attempts=4, backoff_base_ms=10_000)
        newsletter = Message(b"News!", {"queue": "mail"}, delay_ms=HOUR_MS)
        (message_id,) = broker.publish([newsletter])
        published_at_ms = clock.now_ms()

        print("A newsletter, to be sent in an hour:")
        print(f"    now: {len(broker.claim('mail'))} to claim")
        clock.advance(HOUR_MS)
        print("    an hour later:")

        while broker.stats("mail").failed == 0:
            if not deliver(broker, server_is_up=False):
                # A sweep says when there is something to do next: a sweeper sleeps till then.
                due_ms = broker.sweep().next_due_ms or 0
                waited_ms = max(due_ms - clock.now_ms(), 1)
                clock.advance(waited_ms)
                print(f"    ... {waited_ms / 1000:.1f} seconds later:")

        print("\nIt has failed, and can be looked into:")
        for attempt in broker.attempts("mail", message_id):
            after_s = (attempt.claimed_at_ms - published_at_ms) / 1000
            print(
                f"    attempt {attempt.number} by {attempt.consumer}, {after_s:.0f} seconds after "
                f"it was published: {attempt.end} ({attempt.reason})"
            )

        print("\nThe server is back; failed mail is tried again, with a full set of attempts:")
        print(f"    redriven: {broker.redrive('mail')}")
        deliver(broker, server_is_up=True)
        stats = broker.stats("mail")
        print(f"    waiting {stats.available}, failed {stats.failed}, done {stats.done}")


if __name__ == "__main__":
    main()
