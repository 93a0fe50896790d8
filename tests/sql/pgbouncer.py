"""Starts PgBouncer, a pooler, in front of a PostgreSQL server of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from tests.ports import free_ports
from tests.sql.postgres import NOBODY
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sql.postgres import PostgresServer

# Debian has it where only root looks.
PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@contextmanager
def pooling(server: PostgresServer, database: str, mode: str, sessions: int) -> Iterator[str]:
    """Run a pooler with so many sessions for a user; gives the address of its database.

    Without PgBouncer tests are skipped, but not where all must run.
    """
    if PROGRAM is None:
        missing = "no PgBouncer; on Debian: apt-get install pgbouncer"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    (port,) = free_ports(1)
    place = Path(tempfile.mkdtemp(prefix="penstock-pgbouncer-"))
    settings, users = place / "pgbouncer.ini", place / "users"
    users.write_text('"postgres" ""\n"pooled" ""\n')
    settings.write_text(
        f"[databases]\n{database} = host=127.0.0.1 port={server.port}\n[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
        f"auth_type = trust\nauth_file = {users}\n"
        f"pool_mode = {mode}\ndefault_pool_size = {sessions}\n"
    )
    command = ["setpriv", "--pdeathsig=TERM"]
    if os.geteuid() == 0:
        # It does not run as root.
        command += [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        for path in (place, settings, users):
            os.chown(path, NOBODY, NOBODY)
    url = f"postgresql://postgres@127.0.0.1:{port}/{database}"

    def answers() -> bool:
        try:
            psycopg.connect(url, connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    with (place / "log").open("wb") as log:
        process = subprocess.Popen([*command, PROGRAM, str(settings)], stdout=log, stderr=log)
    try:
        wait_until(lambda: process.poll() is not None or answers())
        assert process.poll() is None, (place / "log").read_text()
        yield url
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(place)
