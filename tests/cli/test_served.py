"""Every command through the URL of a server, or the reason why it works on a store alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import click
import pytest
from click.testing import CliRunner, Result
from tests.server.conftest import issue
from tests.waiting import wait_until

import penstock
from penstock.cli.main import COMMANDS, EXAMPLES, SECTIONS, cli
from penstock.server import running
from penstock.server.keys import add_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.client import Client


def run(*words: object, url: str = "", **environment: str) -> Result:
    env = {"PENSTOCK_URL": url, "PENSTOCK_STORE": "", **environment}
    return CliRunner().invoke(cli, [*map(str, words)], env=env)


# One server for all, and the commands in the order of the table.
pytestmark = pytest.mark.xdist_group("cli")


class World:
    """A server on a store, with messages in each state, and a client of it."""

    def __init__(self, url: str, store: str, client: Client) -> None:
        self.url, self.store, self.client = url, store, client
        client.create_queue("orders", max_attempts=1)
        client.create_queue("other")
        client.create_queue("old")
        client.release([self.claim()], reason="no paper")
        for number in range(12):
            client.send("orders", b"%d" % number, price=number)

    def claim(self) -> str:
        """Claim a message; return its receipt."""
        self.client.send("orders", b"x")
        (taken,) = self.client.claim("orders")
        return taken.receipt

    def json(self, *words: object) -> Any:
        result = run(*words, "--json", url=self.url)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    path = tmp_path_factory.mktemp("served")
    store = f"rocksdb:{path / 'store'}"
    backups = path / "backups"
    with running(store, native="127.0.0.1:0", backup_directory=backups) as server:
        url = server.location("native")
        with penstock.connect(url) as client:
            yield World(url, store, client)


# Command: its arguments, and what it then says. RECEIPT stands for one of a message that is held.
SERVED: dict[str, tuple[list[str], str]] = {
    "queues": ([], "orders"),
    "create": (["books", "--filter", "kind = 'book'"], "kind = 'book'"),
    "update": (["other", "--label", "team=a", "--lease", "5s"], "5000"),
    "delete": (["old", "--yes"], "removed queue old"),
    "stats": ([], "published_total"),
    "top": (["--once", "--every", "20ms"], "orders"),
    "publish": (["a novel", "-a", "kind=book"], "published message"),
    "send": (["orders", "hello", "--priority", "3"], "published message"),
    "browse": (["orders", "--limit", "1"], "there is more: --cursor"),
    "claim": (["orders", "--limit", "1", "--lease", "1h"], "lease ends"),
    "ack": (["RECEIPT"], "done"),
    "release": (["RECEIPT", "--reason", "torn"], "failed"),
    "extend": (["RECEIPT", "--lease", "1h"], "extended"),
    "attempts": (["orders", "1"], "no paper"),
    "explain": (["orders", "1"], "Queue orders has it (failed): its filter took it."),
    "tail": (["orders", "--state", "failed", "--from-start", "--limit", "1"], "no paper"),
    "redrive": (["orders"], "messages are available again"),
    "move": (["orders", "other", "--state", "available", "--limit", "1"], "moved 1 messages"),
    "purge": (["orders", "--yes", "--state", "failed", "--id", "9999"], "removed 0"),
    "sweep": ([], "leases_expired"),
    "backup copy": (["monday"], "backed up to"),
    "backup create": (["--name", "tuesday"], "backed up as tuesday"),
    "log stats": ([], "inline"),
    "log configure": (["--retention", "1h"], "3600000"),
    "log read": (["--limit", "3"], "offset"),
    "backfill": (["orders"], "added"),
    "bench": (["--seconds", "50ms", "--workers", "2"], "a server"),
    "doctor": ([], "answers in"),
}
# Command: its arguments on a server, and what it says must be done instead.
STORE_ONLY: dict[str, tuple[list[str], str]] = {
    "check": ([], "penstock backup verify PLACE"),
    "salvage": (["URL", "rocksdb:./new"], "stop the server"),
    "copy": (["URL", "rocksdb:./new"], "grpc://HOST:8815"),
    "cluster status": ([], "name the database"),
    "cluster resize": (["2"], "name the database"),
    "cluster split": (["orders"], "name the database"),
}
# Commands of files, processes or Spark, which take no URL of a broker; and three with tests of
# their own, below and in test_cli.
APART = {
    *("up", "completion", "filter test", "serve", "config", "restore"),
    *("work", "route", "import queueber"),
    *(f"backup {name}" for name in ("list", "verify", "prune", "restore")),
    *(f"keys {name}" for name in ("add", "rotate", "list", "remove")),
    *(f"pipeline {name}" for name in ("route", "status", "backfill", "archive", "collect")),
    *(f"pipeline {name}" for name in ("report", "redrive", "publish", "run", "check")),
}


def leaves() -> dict[str, click.Command]:
    context = click.Context(cli)
    found: dict[str, click.Command] = {}
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        inner = command.commands.items() if isinstance(command, click.Group) else ()
        found |= {f"{name} {each}": one for each, one in inner} or {name: command}
    return found


def test_every_command_is_in_a_table() -> None:
    assert set(leaves()) == {*SERVED, *STORE_ONLY, *APART}


@pytest.mark.parametrize("name", SERVED)
def test_a_command_through_a_server(world: World, name: str) -> None:
    arguments, said = SERVED[name]
    words = [world.claim() if each == "RECEIPT" else each for each in arguments]
    result = run(*name.split(), *words, url=world.url)
    assert result.exit_code == 0, result.output
    assert said in result.output


@pytest.mark.parametrize("name", STORE_ONLY)
def test_a_command_for_stores_refuses_a_server(world: World, name: str) -> None:
    arguments, said = STORE_ONLY[name]
    words = [world.url if each == "URL" else each for each in arguments]
    result = run(*name.split(), *words, url=world.url)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", leaves())
def test_the_help_of_a_command_has_an_example_and_json(name: str) -> None:
    command = leaves()[name]
    shown = run(*name.split(), "--help")
    assert shown.exit_code == 0
    assert f"Example:\n    {EXAMPLES[name]}" in shown.stdout
    assert f"penstock {name}" in EXAMPLES[name]
    options = {option for each in command.params for option in each.opts}
    assert "--json" in options or name in {"serve", "completion", "pipeline run"}


def test_the_help_is_in_sections() -> None:
    lines = run("--help").stdout.splitlines()
    assert [line[:-1] for line in lines if line[:-1] in SECTIONS] == list(SECTIONS)


def test_all_queues_are_counted(world: World) -> None:
    names = [spec.name for spec in world.client.queues()]
    shown = world.json("stats", "--all")
    assert [each["queue"] for each in shown["queues"]] == names
    depths = [each["available"] for each in shown["queues"]]
    assert shown["total"]["queues"] == len(names)
    assert shown["total"]["available"] == sum(depths)
    (deepest,) = world.json("stats", "--top", "1")["queues"]
    assert deepest["available"] == max(depths)
    rows = world.json("top", "--once", "--every", "10ms", "--sort", "queue")
    assert [each["queue"] for each in rows] == names


def test_a_backup_of_a_server_is_verified(world: World) -> None:
    made = run("backup", "tuesday", "--url", world.url, "--verify")
    assert made.exit_code == 0, made.stderr
    assert "is sound" in made.stdout
    assert world.json("backup", "wednesday")["bytes"] > 0
    assert "is there already" in run("backup", "tuesday", url=world.url).stderr


def test_a_worker_on_a_server(world: World, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("def handle(delivery):\n    print(delivery.payload)\n")
    world.client.create_queue("worked")
    world.client.send("worked", b"one")
    child = subprocess.Popen(
        [sys.executable, "-m", "penstock", "work", "shop:handle", "--queue", "worked"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        env={**os.environ, "PENSTOCK_URL": world.url},
        text=True,
    )
    try:
        wait_until(lambda: world.client.stats("worked").done == 1)
    finally:
        child.send_signal(signal.SIGINT)
        said, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    assert "processed 1" in said


def test_routing_through_a_server() -> None:
    with running("memory:", native="127.0.0.1:0", routing="pipeline") as server:
        url = server.location("native")
        for words in (["create", "orders"], ["send", "orders", "x"]):
            assert run(*words, url=url).exit_code == 0
        assert "read 1 messages" in run("route", url=url).output
        assert server.broker.stats("orders").available == 1
        refused = run("bench", url=url)
        assert (refused.exit_code, "pipeline that routes" in refused.stderr) == (1, True)


# --- how a server is named ------------------------------------------------------------------------


def test_nothing_named_is_told_both_ways() -> None:
    result = run("queues", HOME="/nonexistent", XDG_CONFIG_HOME="", PENSTOCK_CONFIG="")
    assert result.exit_code == 2
    assert "--url penstock://127.0.0.1:8814" in result.stderr
    assert "--url rocksdb:./data" in result.stderr


def test_a_store_that_is_served_names_its_server(world: World) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "penstock", "queues", "--url", world.store],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 1
    assert f"--url {world.url}" in child.stderr


def test_memory_ends_with_the_command() -> None:
    result = run("create", "orders", url="memory:")
    assert result.exit_code == 1
    assert "a store in memory ends with the command" in result.stderr
    assert "a store of this process" in run("bench", "--seconds", "20ms", url="memory:").stdout


def test_nobody_there_is_exit_code_3() -> None:
    result = run("queues", url="penstock://127.0.0.1:9")
    assert result.exit_code == 3
    assert result.stderr.startswith("Error: no server at 127.0.0.1:9: ")
    assert "'penstock up' starts one" in result.stderr


def test_both_spellings_and_all_places(world: World, tmp_path: Path) -> None:
    for flag in ("--url", "--store"):
        assert run("queues", flag, world.url).exit_code == 0
    assert run("queues", url="", PENSTOCK_STORE=world.url).exit_code == 0
    # The server's own file may have the section of its clients.
    (tmp_path / "penstock").mkdir()
    file = tmp_path / "penstock" / "config.toml"
    file.write_text(f'[listen]\nnative = "off"\n[client]\nurl = "{world.url}"\n')
    assert run("queues", PENSTOCK_CONFIG=str(file)).exit_code == 0
    assert run("queues", PENSTOCK_CONFIG="", XDG_CONFIG_HOME=str(tmp_path)).exit_code == 0
    assert run("config", PENSTOCK_CONFIG=str(file)).exit_code == 0
    file.write_text('[client]\nuri = "x"\n')
    wrong = run("queues", PENSTOCK_CONFIG=str(file))
    assert wrong.exit_code == 1
    assert "there are url, token" in wrong.stderr
    assert "can't be read" in run("queues", PENSTOCK_CONFIG=str(tmp_path / "no.toml")).stderr


def test_the_key_comes_from_the_url_the_environment_or_the_file(tmp_path: Path) -> None:
    keys, file = tmp_path / "keys.toml", tmp_path / "config.toml"
    root = f"root:{add_key(keys, 'root', ['all'])}"
    low = f"low:{add_key(keys, 'low', ['consume:q'])}"
    with (
        running("memory:", native="127.0.0.1:0", keys=keys) as server,
        running("memory:", native="127.0.0.1:0", keys=keys) as elsewhere,
    ):
        url, other = (each.location("native") for each in (server, elsewhere))
        server.broker.create_queue("q")
        refused = run("queues", url=url)
        assert refused.exit_code == 1
        assert "PENSTOCK_TOKEN='KEY:SECRET'" in refused.stderr
        assert run("queues", url=url, PENSTOCK_TOKEN=root).exit_code == 0
        assert run("queues", url=url.replace("//", f"//{root}@")).exit_code == 0
        wrong = run("queues", url=url.replace("//", "//root:wrong@"))
        assert (wrong.exit_code, "wrong" in wrong.output) == (1, False)
        (tmp_path / "token").write_text(f"{root}\n")
        for line in (f'token = "{root}"', f'token_file = "{tmp_path / "token"}"'):
            file.write_text(f'[client]\nurl = "{url}"\n{line}\n')
            assert run("queues", PENSTOCK_CONFIG=str(file)).exit_code == 0
            # A key is not told to another server than the one it is for.
            assert run("queues", "--url", other, PENSTOCK_CONFIG=str(file)).exit_code == 1
        # A key for one queue sees that one.
        assert run("stats", "q", url=url, PENSTOCK_TOKEN=low).exit_code == 0
        assert run("stats", url=url, PENSTOCK_TOKEN=low).exit_code == 1
        looked = run("doctor", "--json", url=url, PENSTOCK_TOKEN=low)
        assert looked.exit_code == 0
        assert "may not list queues" in looked.stdout
        looked = run("doctor", "--json", url=url, PENSTOCK_TOKEN="low:wrong")
        assert (looked.exit_code, "penstock keys add" in looked.stdout) == (1, True)


def test_tls_by_the_config_file(tmp_path: Path) -> None:
    file, certs = tmp_path / "config.toml", issue(tmp_path / "tls")
    with running(
        "memory:",
        native="127.0.0.1:0",
        tls_certificate=certs.certificate,
        tls_key=certs.key,
        tls_client_ca=certs.ca,
    ) as server:
        url = server.location("native")
        assert url.startswith("penstocks:")
        refused = run("queues", url=url)
        assert refused.exit_code == 3
        assert (
            "is not trusted: name the file of its CA by ca=FILE in the URL, or PENSTOCK_CA"
            in refused.stderr
        )
        plain = run("queues", url=url.replace("penstocks:", "penstock:"))
        assert plain.exit_code == 3
        assert f"connect to {url}" in plain.stderr
        assert "tls=" not in plain.stderr
        lines = [f'url = "{url}"', f'ca = "{certs.ca}"']
        lines += [f'certificate = "{certs.client_certificate}"', f'key = "{certs.client_key}"']
        file.write_text("\n".join(["[client]", *lines]))
        assert run("queues", PENSTOCK_CONFIG=str(file)).stdout == "no queues\n"
        assert "the certificate is trusted" in run("doctor", PENSTOCK_CONFIG=str(file)).stdout
        file.write_text(f'[client]\nurl = "{url}"\nca = "{tmp_path / "no.pem"}"')
        assert "no.pem can't be read" in run("queues", PENSTOCK_CONFIG=str(file)).stderr


@pytest.mark.parametrize(
    "url", ["penstock://a..b:1", "penstock://:8814", "penstock://h:99999", "penstock://h/queue"]
)
def test_a_wrong_url_is_one_line(url: str) -> None:
    result = run("queues", url=url)
    assert result.exit_code in {1, 3}
    assert "Traceback" not in result.output
    assert len(result.stderr.splitlines()) == 1


def test_settings_that_differ_are_named_with_the_command(world: World) -> None:
    result = run("create", "orders", "--max-attempts", "3", "--lease", "1s", url=world.url)
    assert result.exit_code == 1
    assert "lease_ms is 30000 there, 1000 was asked for" in result.stderr
    assert "max_attempts is 1 there, 3 was asked for" in result.stderr
    assert "penstock update orders" in result.stderr
