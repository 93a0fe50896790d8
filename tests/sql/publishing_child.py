"""A broker's process: ``publishing_child.py URL NAME COUNT`` publishes and prints the ids as JSON.

Messages without a group, of one group and of several, one publish after the other.
"""

from __future__ import annotations

import json
import sys
from itertools import cycle
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.crash.child import say

import penstock
from penstock import Message

GROUPS = (("",), ("a",), ("b", "c", "d"), ("", "", "e"))


def main(url: str, name: str, count: int) -> None:
    ids: list[int] = []
    with penstock.open(url, background=False) as broker:
        say("ready")
        sys.stdin.readline()
        for _, groups in zip(range(count), cycle(GROUPS), strict=False):
            ids += broker.publish(
                [Message(name.encode(), {"queue": "q"}, group=group) for group in groups]
            )
    say(json.dumps(ids))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
