"""Another process at the same store: ``sql_child.py URL QUEUE`` settles what it can get.

It goes on until its input ends, and then prints the ids of the messages that it has settled.
"""

from __future__ import annotations

import sys
import threading

import penstock


def main(url: str, queue: str) -> None:
    over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        over.set()

    settled: list[int] = []
    with penstock.open(url) as broker:
        sys.stdout.write("working\n")
        sys.stdout.flush()
        threading.Thread(target=wait, daemon=True).start()
        while not over.is_set():
            # Slowly: this process's sequence numbers stay behind the other's.
            held = broker.claim(queue, limit=1, wait_ms=100)
            outcomes = broker.ack([each.receipt for each in held])
            settled += [each.message_id for each, ok in zip(held, outcomes, strict=True) if ok]
            over.wait(0.02)
    sys.stdout.write(" ".join(map(str, settled)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
