"""Publishes, tails and switches the routing back and forth until it is killed; tells the ids."""

from __future__ import annotations

import itertools
import sys
import threading

import penstock
from penstock import Broker, InvalidInput, Message, Tailer

GROUPS = ("", "a", "b", "c")


def produce(broker: Broker) -> None:
    while True:
        ids = broker.publish([Message(b"", group=group) for group in GROUPS])
        # One write: the lines of several threads stay whole.
        sys.stdout.write(" ".join(map(str, ids)) + "\n")
        sys.stdout.flush()


def switch(broker: Broker, routing: str) -> None:
    try:
        broker.configure_log(routing=routing)  # type: ignore[arg-type]
    except InvalidInput:
        # The tailer is too far behind.
        penstock.route_once(broker)


def tail(broker: Broker) -> None:
    try:
        Tailer(broker, limit=30, poll_ms=1).run()
    except InvalidInput:
        # The store routes inline by now.
        return


def main(url: str) -> None:
    with penstock.open(url) as broker:
        for _ in range(2):
            threading.Thread(target=produce, args=[broker], daemon=True).start()
        for routing in itertools.cycle(("pipeline", "inline")):
            switch(broker, routing)
            threading.Thread(target=tail, args=[broker], daemon=True).start()
            threading.Event().wait(0.02)


if __name__ == "__main__":
    main(sys.argv[1])
