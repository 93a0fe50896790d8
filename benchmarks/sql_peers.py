"""Two queues on plain tables of PostgreSQL, which the store is compared with.

``Bare``: one table, claimed with SKIP LOCKED; an acknowledged row is deleted, and nothing is kept.
``Pgmq``: the tables and statements of the extension pgmq: a message is JSON, its visibility is a
time that has an index, and an acknowledged row goes into an archive.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol, Self

import psycopg

import penstock

if TYPE_CHECKING:
    from collections.abc import Sequence

LEASE_S = 60


class Queue(Protocol):
    """A queue that is measured: each verb returns when the database has committed it."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...

    def publish(self, count: int) -> int:
        """Publish so many messages; return how many."""
        ...

    def work(self, count: int) -> int:
        """Claim up to so many messages and acknowledge them; return how many."""
        ...


class Penstock:
    """A queue of this store."""

    def __init__(self, url: str, payload: bytes) -> None:
        self._broker = penstock.open(url)
        self._message = penstock.Message(payload, {"queue": "q"})

    @staticmethod
    def make(url: str) -> None:
        """Make the queue."""
        with penstock.open(url) as broker:
            broker.create_queue("q")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._broker.close()

    def publish(self, count: int) -> int:
        return len(self._broker.publish([self._message] * count))

    def work(self, count: int) -> int:
        deliveries = self._broker.claim("q", limit=count, lease_ms=LEASE_S * 1_000)
        return sum(map(bool, self._broker.ack([each.receipt for each in deliveries])))


class _Table:
    """A queue on tables of its own, by one connection, with statements that are prepared."""

    TABLES: str
    PUBLISH: str
    CLAIM: str
    SETTLE: str

    def __init__(self, url: str, payload: bytes) -> None:
        self._payload: Any = payload
        self._connection = psycopg.connect(url, autocommit=True)
        self._connection.prepare_threshold = 0

    @classmethod
    def make(cls, url: str) -> None:
        """Make the tables."""
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(cls.TABLES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def _run(self, text: str, *parameters: object) -> Sequence[tuple[Any, ...]]:
        return self._connection.execute(text, parameters, binary=True).fetchall()

    def publish(self, count: int) -> int:
        return len(self._run(self.PUBLISH, [self._payload] * count))

    def work(self, count: int) -> int:
        ids = [row[0] for row in self._run(self.CLAIM, count)]
        return len(self._run(self.SETTLE, ids)) if ids else 0


class Bare(_Table):
    """One table."""

    TABLES = """
        CREATE TABLE jobs (
            id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            visible_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            payload bytea NOT NULL
        );
        CREATE INDEX ON jobs (visible_at)
    """
    PUBLISH = "INSERT INTO jobs (payload) SELECT unnest(%b::bytea[]) RETURNING id"
    CLAIM = f"""
        WITH picked AS (
            SELECT id FROM jobs WHERE visible_at <= clock_timestamp()
            ORDER BY id LIMIT %b FOR UPDATE SKIP LOCKED
        )
        UPDATE jobs j SET visible_at = clock_timestamp() + interval '{LEASE_S} s'
        FROM picked p WHERE j.id = p.id RETURNING j.id, j.payload
    """
    SETTLE = "DELETE FROM jobs WHERE id = ANY (%b) RETURNING id"


class Pgmq(_Table):
    """A queue and its archive."""

    TABLES = """
        CREATE TABLE q_jobs (
            msg_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            read_ct integer NOT NULL DEFAULT 0,
            enqueued_at timestamptz NOT NULL DEFAULT now(),
            vt timestamptz NOT NULL,
            message jsonb,
            headers jsonb
        );
        CREATE INDEX ON q_jobs (vt);
        CREATE TABLE a_jobs (
            msg_id bigint PRIMARY KEY,
            read_ct integer NOT NULL,
            enqueued_at timestamptz NOT NULL,
            archived_at timestamptz NOT NULL DEFAULT now(),
            vt timestamptz NOT NULL,
            message jsonb,
            headers jsonb
        );
        CREATE INDEX ON a_jobs (archived_at)
    """
    PUBLISH = """
        INSERT INTO q_jobs (vt, message)
        SELECT clock_timestamp(), m::jsonb FROM unnest(%b::text[]) AS m RETURNING msg_id
    """
    CLAIM = f"""
        WITH picked AS (
            SELECT msg_id FROM q_jobs WHERE vt <= clock_timestamp()
            ORDER BY msg_id LIMIT %b FOR UPDATE SKIP LOCKED
        )
        UPDATE q_jobs m
        SET vt = clock_timestamp() + interval '{LEASE_S} s', read_ct = read_ct + 1
        FROM picked p WHERE m.msg_id = p.msg_id
        RETURNING m.msg_id, m.read_ct, m.enqueued_at, m.vt, m.message, m.headers
    """
    SETTLE = """
        WITH gone AS (
            DELETE FROM q_jobs WHERE msg_id = ANY (%b)
            RETURNING msg_id, read_ct, enqueued_at, vt, message, headers
        )
        INSERT INTO a_jobs (msg_id, read_ct, enqueued_at, vt, message, headers)
        SELECT * FROM gone RETURNING msg_id
    """

    def __init__(self, url: str, payload: bytes) -> None:
        super().__init__(url, payload)
        # As many bytes of JSON.
        self._payload = json.dumps(payload.decode()[2:])


QUEUES: dict[str, type[Penstock | Bare | Pgmq]] = {
    "Penstock": Penstock,
    "bare table": Bare,
    "pgmq": Pgmq,
}
