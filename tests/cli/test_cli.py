"""The command line, as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rocksdict as rocks
from click.testing import CliRunner, Result

import penstock
from penstock.cli.common import duration
from penstock.cli.main import COMMANDS, cli
from penstock.importers import queueber_source as keys
from penstock.server import running
from penstock.store import codec

ROOT = Path(__file__).resolve().parents[2]


class Shell:
    """Runs commands on one store."""

    def __init__(self, url: str) -> None:
        self.url = url

    def run(self, *words: str, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(cli, words, input=stdin, env={"PENSTOCK_STORE": self.url})

    def ok(self, *words: str, stdin: str | bytes | None = None) -> str:
        result = self.run(*words, stdin=stdin)
        assert result.exit_code == 0, result.output
        return result.stdout

    def json(self, *words: str) -> Any:
        return json.loads(self.ok(*words, "--json"))

    def refused(self, *words: str, code: int = 1) -> str:
        result = self.run(*words)
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return result.stderr


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    made = Shell(f"rocksdb:{tmp_path / 'store'}")
    made.ok("create", "orders", "--max-attempts", "1")
    return made


@pytest.mark.parametrize(
    "words",
    [
        ("update", "orders"),
        ("publish",),
        ("publish", "x", "--payload-file", "-"),
        ("send", "orders", "x", "--lines", "--dedup-id", "a"),
    ],
)
def test_a_mistake_does_not_open_the_store(tmp_path: Path, words: tuple[str, ...]) -> None:
    """On object storage it would take the store from the process that has it."""
    url = f"slatedb+file://{tmp_path}/store"
    with penstock.open(url, background=False) as owner:
        owner.create_queue("orders")
        assert "Usage" in Shell(url).refused(*words, code=2)
        assert owner.send("orders", b"") == 1


def test_help_lists_every_command_without_loading_one() -> None:
    probe = (
        "import sys; from click.testing import CliRunner; from penstock.cli.main import cli\n"
        "result = CliRunner().invoke(cli, ['--help'], prog_name='penstock')\n"
        "heavy = {'rich', 'rocksdict', 'capnp', 'penstock.cli.common'}\n"
        "print(result.exit_code, sorted(heavy & set(sys.modules)), result.output)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{probe}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.startswith("0 [] Usage: penstock")
    for name, (_, text) in COMMANDS.items():
        assert any(line.split() == [name, *text.split()] for line in run.stdout.splitlines())


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_says_what_the_list_says(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    assert COMMANDS[name][1] in result.output


def test_version() -> None:
    result = CliRunner().invoke(cli, ["--version"])
    assert result.output == f"penstock, version {penstock.__version__}\n"


def test_queues(shell: Shell) -> None:
    made = shell.json(
        "create", "books", "--filter", "kind='book'", "--fifo", "--lease", "2m", "--delay", "5"
    )
    assert made["filter"] == "kind = 'book'"
    assert (made["ordering"], made["lease_ms"], made["delay_ms"]) == ("fifo", 120_000, 5)
    assert [spec["name"] for spec in shell.json("queues")] == ["books", "orders"]
    assert "kind = 'book'" in shell.ok("queues")
    changed = shell.json("update", "books", "--done-retention", "7d", "--description", "for books")
    assert (changed["done_retention_ms"], changed["version"]) == (604_800_000, 2)
    assert "for books" in shell.ok("update", "books", "--backoff-cap", "1h")
    assert "at least one setting" in shell.refused("update", "books", code=2)
    assert "exists with other settings" in shell.refused("create", "books")


def test_delete_asks_first(shell: Shell) -> None:
    shell.ok("send", "orders", "x")
    assert shell.run("delete", "orders", stdin="n\n").exit_code == 1
    assert shell.json("stats", "orders")["queues"][0]["available"] == 1
    assert "with 1 messages" in shell.ok("delete", "orders", stdin="y\n")
    assert shell.ok("queues") == "no queues\n"
    assert "orders" in shell.refused("delete", "orders", "--yes")


def test_payloads_and_attributes(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(b"\xff\x00")
    shell.ok(
        "send", "orders", "höchst",
        "-a", "n=12", "-a", "code=007", "-a", "yes=true", "-a", 's="1"', "-a", "empty=",
        "-a", "l=[1]",
        "--group", "g", "--priority", "9",
    )  # fmt: skip
    shell.ok("send", "orders", "--payload-file", str(tmp_path / "body"))
    piped = shell.ok("send", "orders", "--payload-file", "-", stdin=b"piped")
    assert piped.startswith("published message ")
    entries = shell.json("browse", "orders")["entries"]
    by_payload = {entry.get("payload"): entry for entry in entries}
    first = by_payload["höchst"]
    assert first["attributes"] == {
        "n": 12, "code": "007", "yes": True, "s": "1", "empty": "", "l": "[1]", "queue": "orders",
    }  # fmt: skip
    assert (first["group"], first["priority"]) == ("g", 9)
    assert by_payload[None]["payload_base64"] == "/wA="
    assert "piped" in by_payload
    assert "2 bytes" in shell.ok("browse", "orders")
    assert "sent to 'orders'" in shell.refused("send", "orders", "x", "-a", "queue=other")


def test_lines(shell: Shell) -> None:
    text = "".join(f"line {number}\r\n" for number in range(2_500))
    assert shell.ok("send", "orders", "--payload-file", "-", "--lines", stdin=text) == (
        "published 2500 messages\n"
    )
    page = shell.json("browse", "orders", "--limit", "2")
    assert [entry["payload"] for entry in page["entries"]] == ["line 0", "line 1"]
    rest = shell.json("browse", "orders", "--cursor", page["next_cursor"], "--limit", "1")
    assert rest["entries"][0]["payload"] == "line 2"
    assert "--cursor available:" in shell.ok("browse", "orders", "--limit", "1")


def test_publish_goes_where_filters_say(shell: Shell) -> None:
    shell.ok("create", "books", "--filter", "kind = 'book'")
    [one] = shell.json("publish", "x", "-a", "kind=book", "--dedup-id", "a")["ids"]
    [same] = shell.json("publish", "x", "-a", "kind=book", "--dedup-id", "a")["ids"]
    assert one == same
    assert shell.json("stats", "books")["queues"][0]["available"] == 1
    assert shell.json("stats")["store"]["duplicates_total"] == 1
    assert "takes messages where kind = 'book'" in shell.refused("send", "books", "x")
    assert "duplicates_total" in shell.ok("stats")


def test_usage_errors(shell: Shell) -> None:
    shell.refused("send", "orders", code=2)
    shell.refused("send", "orders", "x", "--payload-file", "-", code=2)
    shell.refused("send", "orders", "x", "--lines", "--dedup-id", "a", code=2)
    shell.refused("send", "orders", "x", "-a", "novalue", code=2)
    shell.refused("claim", "orders", "--lease", "5y", code=2)
    shell.refused("no-such-command", code=2)
    shell.refused("browse", "orders", "--state", "lost", code=2)


def test_claim_and_settle(shell: Shell) -> None:
    assert shell.ok("claim", "orders") == "nothing to claim\n"
    for payload in ("a", "b"):
        shell.ok("send", "orders", payload)
    held = shell.json("claim", "orders", "--limit", "2", "--lease", "1h", "--consumer", "me")
    assert [each["payload"] for each in held] == ["a", "b"]
    first, second = (each["receipt"] for each in held)
    [extended] = shell.json("extend", first, "--lease", "2h")
    assert extended["lease_deadline_ms"] > held[0]["lease_deadline_ms"]
    assert "me" in shell.ok("browse", "orders", "--state", "in_flight")
    assert shell.json("ack", first)[0]["status"] == "done"
    refused = shell.run("ack", first, "--json")
    assert refused.exit_code == 1
    assert json.loads(refused.stdout)[0]["status"] == "stale"
    assert "1 of 1 receipts were refused" in refused.stderr
    assert "failed" in shell.ok("release", second, "--reason", "no paper")
    [attempt] = shell.json("attempts", "orders", str(held[1]["message_id"]))
    assert (attempt["consumer"], attempt["reason"]) == ("me", "no paper")
    assert "no paper" in shell.ok("browse", "orders", "--state", "failed")
    assert "not a receipt" in shell.refused("ack", "nonsense")


def test_redrive_purge_and_sweep(shell: Shell) -> None:
    for price in (1, 2, 3):
        shell.ok("send", "orders", "x", "-a", f"price={price}")
    receipts = [each["receipt"] for each in shell.json("claim", "orders", "--limit", "3")]
    shell.ok("release", *receipts)
    assert shell.json("redrive", "orders", "--where", "price > 1")["redriven"] == 2
    [left] = shell.json("browse", "orders", "--state", "failed")["entries"]
    assert shell.json("redrive", "orders", "--id", str(left["message_id"]))["redriven"] == 1
    assert shell.run("purge", "orders", stdin="n\n").exit_code == 1
    assert shell.json("purge", "orders", "--state", "available", "--yes")["removed"] == 3
    shell.ok("send", "orders", "x")
    shell.ok("claim", "orders", "--lease", "1")
    swept = shell.json("sweep")
    assert (swept["leases_expired"], swept["failed"]) in {(1, 1), (1, 0), (0, 1)}
    assert "leases_expired" in shell.ok("sweep")


def test_errors_are_one_line(shell: Shell, tmp_path: Path) -> None:
    assert shell.refused("stats", "nowhere").splitlines() == ["Error: no queue named 'nowhere'"]
    nothing = Shell(f"rocksdb:{tmp_path / 'nothing'}")
    assert "there is no store at" in nothing.refused("queues")
    assert not (tmp_path / "nothing").exists()
    assert "no store is named by" in Shell("redis:x").refused("queues")
    result = CliRunner().invoke(cli, ["queues"], env={"PENSTOCK_STORE": ""})
    assert result.exit_code == 2
    with penstock.open(shell.url):
        assert "is already open" in shell.refused("queues")


def test_filter_test() -> None:
    words = ["filter", "test", "kind = 'book' AND (price > 10 OR size > 3)"]
    result = CliRunner().invoke(cli, [*words, '{"kind": "book", "price": 3}', "--size", "3"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[-1] == "does not match: the filter is false"
    assert any("true" in line and '(kind is "book")' in line for line in lines)
    assert any("false" in line and "(price is 3)" in line for line in lines)
    result = CliRunner().invoke(cli, [*words, '{"kind": "book"}', "--size", "4", "--json"])
    found = json.loads(result.output)
    assert found["matches"] is True
    assert found["explanation"]["parts"][1]["parts"][0]["result"] is None


def test_explain(shell: Shell) -> None:
    shell.ok("create", "books", "--filter", "kind = 'book' AND price > 10")
    shell.ok("publish", "x", "-a", "kind=book", "-a", "price=\x1b[31m", "-a", "queue=orders")
    (second,) = shell.json("publish", "x", "-a", "kind=book", "-a", "price=12")["ids"]
    lines = shell.ok("explain", "books", "1").splitlines()
    assert lines[0] == "Queue books does not have it: its filter does not take it."
    assert any("unknown" in line and "price is" in line for line in lines)
    assert any("orders" in line and "available" in line for line in lines)
    assert "\x1b" not in "".join(lines)
    assert lines[-1] == "the filter counts from offset 1 on"
    found = shell.json("explain", "books", str(second))
    assert (found["state"], found["cause"], found["filter_then"]) == ("available", "taken", None)
    assert found["filter"]["parts"][1]["values"] == {"price": 12}
    shell.ok("update", "books", "--filter", "price > 20")
    assert "the filter at its offset:" in shell.ok("explain", "books", str(second))
    assert "no queue named 'bookz'" in shell.refused("explain", "bookz", "1")


@pytest.mark.parametrize(
    ("expression", "options", "matches"),
    [
        ("\"group\" = 'g' AND priority = 7", ["--group", "g", "--priority", "7"], True),
        ("published_at = 5", ["--published-at", "5"], True),
        ("published_at > 1600000000000", [], True),
        ("missing = 1", [], False),
    ],
)
def test_filter_fields(expression: str, options: list[str], matches: bool) -> None:
    result = CliRunner().invoke(cli, ["filter", "test", expression, *options, "--json"])
    assert json.loads(result.output)["matches"] is matches


def test_filter_errors() -> None:
    for words, code in (
        (["a = = 1"], 1),
        (["a = 1", "[]"], 2),
        (["a = 1", '{"a": [1]}'], 2),
        (["a = 1", "{"], 2),
    ):
        result = CliRunner().invoke(cli, ["filter", "test", *words])
        assert result.exit_code == code
        assert "Error: " in result.stderr


def test_durations() -> None:
    given = ("250", "250ms", "30s", "5m", "2h", "7d")
    assert [duration(text) for text in given] == [250, 250, 30_000, 300_000, 7_200_000, 604_800_000]


def test_import(shell: Shell, tmp_path: Path) -> None:
    capnp = pytest.importorskip("capnp")
    schema = capnp.load(str(Path(codec.__path__[0]) / "queueber.capnp"))
    database = rocks.Rdict(str(tmp_path / "q"), rocks.Options(raw_mode=True))
    for number in range(3):
        id_ = bytes([number]) * 16
        index_key = keys.VISIBILITY_INDEX + (1).to_bytes(8, "big") + b"/" + id_
        made = schema.StoredItem.new_message(contents=b"x", visibilityTsIndexKey=index_key, id=id_)
        database[keys.AVAILABLE + id_] = made.to_bytes() if number else b"broken"
        database[index_key] = keys.AVAILABLE + id_
    database.close()
    words = ["import", "queueber", str(tmp_path / "q"), "--queue", "orders", "--batch", "1"]
    assert "problem at" in shell.ok(*words)
    report = shell.json(*words)
    assert (report["imported"], report["imported_before"], report["skipped"]) == (2, 2, 1)
    assert shell.json("stats", "orders")["queues"][0]["available"] == 2
    assert shell.json(*words, "--restart")["imported_before"] == 0
    with running("memory:", native="127.0.0.1:0") as server:
        served = Shell(server.location("native"))
        assert served.json(*words)["imported"] == 2
        assert served.json(*words)["imported_before"] == 2
        assert server.broker.stats("orders").available == 2
    elsewhere = ["--into", f"rocksdb:{tmp_path / 'new'}"]
    assert "there is nothing at" in shell.refused(
        "import", "queueber", str(tmp_path / "no"), "--queue", "orders", *elsewhere
    )
    assert not (tmp_path / "new").exists()


def test_demo(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), "--orders", "600", "--tenants", "6",
         "--directory", str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "every order was done once in each of its queues, the ledger in order" in run.stdout
    with penstock.open(f"rocksdb:{tmp_path / 'demo'}", background=False) as broker:
        assert broker.store_stats().published_total == 600
        assert broker.stats("ledger").acked_total == 600


def test_labels_and_a_dead_letter_queue(shell: Shell) -> None:
    made = shell.json("create", "dead", "--label", "team=books", "--label", "empty=")
    assert made["labels"] == {"team": "books", "empty": ""}
    changed = shell.json("update", "dead", "--label", "team=films", "--no-label", "empty")
    assert changed["labels"] == {"team": "films"}
    assert "is not NAME=VALUE" in shell.refused("update", "dead", "--label", "team", code=2)
    assert shell.json("update", "orders", "--dead-letter", "dead")["dead_letter"] == "dead"
    assert "no queue named" in shell.refused("update", "orders", "--dead-letter", "nowhere")
    shell.ok("send", "orders", "one")
    (delivery,) = shell.json("claim", "orders")
    shell.ok("release", delivery["receipt"])
    assert shell.json("sweep")["moved"] == 1
    assert [entry["payload"] for entry in shell.json("browse", "dead")["entries"]] == ["one"]
    assert shell.json("update", "orders", "--dead-letter", "")["dead_letter"] == ""


def test_move(shell: Shell) -> None:
    shell.ok("create", "other")
    first, _, third = (
        shell.json("send", "orders", payload)["ids"][0] for payload in ("1", "2", "3")
    )
    assert shell.json("move", "orders", "other") == {"queue": "orders", "to": "other", "moved": 0}
    words = ("move", "orders", "other", "--state", "available")
    assert shell.json(*words, "--id", str(first), "--id", str(third))["moved"] == 2
    assert shell.ok(*words, "--limit", "5") == "moved 1 messages to other\n"
    assert len(shell.json("browse", "other")["entries"]) == 3
    assert "to itself" in shell.refused("move", "orders", "orders")
    assert "no queue named 'nowhere'" in shell.refused("move", "orders", "nowhere")


def test_a_native_address_is_none_for_spark() -> None:
    result = CliRunner().invoke(cli, ["pipeline", "status", "--url", "penstock://127.0.0.1:8814"])
    assert result.exit_code == 2
    assert "grpc://127.0.0.1:8815" in result.output
