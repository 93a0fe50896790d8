"""Publishes to a store and tails it until it is killed: ``tailing_child.py URL``."""

from __future__ import annotations

import sys
import threading

import penstock
from penstock import Broker, Message, route_once


def publish(broker: Broker) -> None:
    for number in range(1_000_000):
        broker.publish(
            [
                Message(b"%d" % number, {"odd": (number + place) % 2 == 1}, group=f"{place}")
                for place in range(5)
            ]
        )


def main() -> None:
    broker = penstock.open(sys.argv[1], routing="pipeline")
    threading.Thread(target=publish, args=[broker], daemon=True).start()
    said = False
    while True:
        if route_once(broker, limit=7) and not said:
            said = True
            sys.stdout.write("routing\n")
            sys.stdout.flush()


main()
