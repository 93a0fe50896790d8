"""The page on the protocol says what the code does, byte for byte."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import cast

from tests.native.serving import SLOW_SECONDS, Served

import penstock
from penstock.client.calls import Verbs
from penstock.clock import ManualClock
from penstock.wire import native as wire

PAGE = (Path(__file__).parent.parent.parent / "docs" / "native-protocol.md").read_text()


def conversation() -> list[tuple[str, bytes]]:
    block = PAGE.rpartition("```text\n")[2].partition("```")[0]
    said: list[tuple[str, bytes]] = []
    for line in block.splitlines():
        if line.startswith("    "):
            who, data = said[-1]
            said[-1] = (who, data + bytes.fromhex(line))
        else:
            said.append((line.split()[0], b""))
    return said


def test_the_conversation_goes_as_written() -> None:
    said = conversation()
    assert [who for who, _ in said] == ["client", "server"] * 6
    clock = ManualClock()
    with (
        penstock.open("memory:", clock=clock, background=False) as broker,
        Served(broker, clock=clock) as served,
        socket.create_connection(("127.0.0.1", served.port), SLOW_SECONDS) as connection,
        connection.makefile("rb") as answers,
    ):
        broker.create_queue("q")
        for who, data in said:
            if who == "client":
                connection.sendall(data)
            else:
                assert answers.read(len(data)) == data


def test_every_request_and_answer_has_its_row() -> None:
    requests, _, answers = PAGE.partition("## Answers")
    rows = re.findall(r"^\| (\d+) \| (\w+) \| ([^|]*) \| [^|]+ \|$", requests, re.MULTILINE)
    shown = {int(kind): (name, arguments.strip()) for kind, name, arguments in rows}
    kinds = {cast(int, each.__struct_config__.tag): each for each in wire.Request.__subclasses__()}
    assert sorted(shown) == sorted(kinds) == list(range(1, 33))
    for kind, (name, arguments) in shown.items():
        request = kinds[kind]
        assert request.__name__ == "".join(part.title() for part in name.split("_"))
        assert name in {*vars(Verbs), "cancel", "consume", "credit"}
        count = len(request.__struct_fields__) - 1
        assert len([each for each in arguments.split(",") if each != "–"]) == count
    tags = re.findall(r"^\| (\d) \| `\[\1,", answers, re.MULTILINE)
    assert tags == ["1", "2", "3", "4", "5", "6"]
    assert f"Version {wire.VERSION}." in PAGE
