"""A database that is killed, and the replica that takes its place; the page about it runs."""

from __future__ import annotations

import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.docs.blocks import run_blocks
from tests.sql.postgres import PostgresServer, serving
from tests.sql.test_faults import QUEUES, judge, running_worker, wait_for_acks, worker
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "on-postgresql.md"


class Replica(PostgresServer):
    """A server that follows another one, which confirms no commit before this one has it."""

    def __init__(self, primary: PostgresServer) -> None:
        super().__init__(durable=True)
        self._primary = primary

    def start(self) -> None:
        copy = self._command("pg_basebackup", f"--pgdata={self._place}/data", "--checkpoint=fast")
        address = ["--host=127.0.0.1", f"--port={self._primary.port}", "--username=postgres"]
        subprocess.run([*copy, *address, "--write-recovery-conf"], check=True, cwd="/")
        super().start()
        with self._primary.connect() as admin:
            admin.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            admin.execute("SELECT pg_reload_conf()")
        wait_until(self._is_synchronous, 60, "the replica does not follow")

    def _is_synchronous(self) -> bool:
        with self._primary.connect() as admin:
            return admin.execute("SELECT sync_state FROM pg_stat_replication").fetchall() == [
                ("sync",)
            ]

    def promote(self) -> None:
        """Make it the server that takes writes."""
        with self.connect() as admin:
            assert admin.execute("SELECT pg_promote()").fetchone() == (True,)


@pytest.fixture
def servers() -> Iterator[tuple[PostgresServer, Replica]]:
    for primary in serving(durable=True):
        replica = Replica(primary)
        try:
            replica.start()
            yield primary, replica
        finally:
            replica.remove()


@pytest.mark.parametrize("ending", ["killed", "silent"])
def test_processes_go_on_with_the_replica(
    servers: tuple[PostgresServer, Replica],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
) -> None:
    primary, replica = servers
    hosts = f"127.0.0.1:{primary.port},127.0.0.1:{replica.port}"
    # A server that is stopped refuses nothing and says nothing: these times bound the wait for it.
    bounds = "connect_timeout=2&statement_timeout_ms=1000&lock_timeout_ms=1000"
    url = (
        f"postgresql://postgres@{hosts}/{primary.create()}?target_session_attrs=read-write&{bounds}"
    )
    monkeypatch.setenv("PENSTOCK_STORE", url)
    run_blocks(PAGE)
    notes = tmp_path / "notes"
    with ExitStack() as stack:
        for name in ("first", "second"):
            if ending == "killed":
                # A broker that publishes, with a worker for each queue.
                running_worker(stack, url, notes, name, *QUEUES)
            else:
                stack.enter_context(worker(url, notes, name))
        wait_for_acks(notes, 40)
        if ending == "killed":
            primary.stop(signal.SIGKILL)
        else:
            stack.enter_context(primary.frozen())
        replica.promote()
        wait_for_acks(notes, 40)
        # Before it could go on beside the new primary.
        primary.stop(signal.SIGKILL)
    judge(url, notes)
    # The page again, on the new server, with the messages that the old one has confirmed.
    run_blocks(PAGE)
