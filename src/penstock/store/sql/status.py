"""How the zones of a store are spread over tokens, and how far a change of the ring has got.

Reads only, over a connection of its own, beside whoever works on the store. A store that is not
there is refused: looking makes none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

import msgspec

from penstock.store.sql.database import Database
from penstock.store.sql.schema import find
from penstock.store.sql.statements import statements_of
from penstock.store.sql.tokens import token_of

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["ClusterLook", "ClusterStatus", "TokenStatus"]

# Zones that are read at a time to see whose token is of another ring.
PAGE: Final = 10_000


class TokenStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One token: its pointers, those that have vested, and for how long the oldest of them has."""

    token: int
    pointers: int
    vested: int
    oldest_lag_ms: int


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A store on a SQL database.

    ``ring_size``: new zones get a token below it; ``ring_high``: claims look at tokens below it.
    ``zones``: those that have a pointer; ``empty_zones``: those that nothing was seen in, which are
    collected when they stay empty; ``old_tokens``: those whose token is not the one that the
    present ring gives. ``waiting`` has the delayed messages too.
    """

    store_id: str
    routing: str
    ring_size: int
    ring_high: int
    zones: int
    empty_zones: int
    old_tokens: int
    vested: int
    oldest_lag_ms: int
    waiting: int
    in_flight: int
    tokens: list[TokenStatus]

    @property
    def rehashed(self) -> float:
        """The part of the zones that have the token of the present ring, from 0 to 1."""
        return 1 - self.old_tokens / self.zones if self.zones else 1.0


class ClusterLook:
    """A connection to look at a store by; close it when done."""

    def __init__(self, conninfo: str, *, schema: str, dialect: str) -> None:
        self._database = Database(conninfo, schema, dialect)
        self._database.use(statements_of(dialect))
        try:
            self._database.connect()
            find(self._database, f"in the schema {schema!r} of the database")
        except BaseException:
            self._database.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection."""
        self._database.close()

    def now_ms(self) -> int:
        """Return what time the database has."""
        return int(self._database.run("server_time")[0][0])

    def status(self) -> ClusterStatus:
        """Look at everything, as of about now."""
        database = self._database
        store_id, routing, ring_size, ring_high, *_ = database.run("load_instance")[0]
        now_ms = self.now_ms()
        tokens = [
            TokenStatus(
                token=token,
                pointers=pointers,
                vested=vested,
                oldest_lag_ms=now_ms - oldest_ms if vested else 0,
            )
            for token, pointers, vested, oldest_ms in database.run("token_status", now_ms=now_ms)
        ]
        empty_zones = int(database.run("count_empty_zones")[0][0])
        waiting, in_flight = database.run("depth_of_all")[0]
        zones, old_tokens = self._old_tokens(int(ring_size))
        return ClusterStatus(
            store_id=f"{store_id:08x}",
            routing=routing,
            ring_size=ring_size,
            ring_high=ring_high,
            zones=zones,
            empty_zones=empty_zones,
            old_tokens=old_tokens,
            vested=sum(each.vested for each in tokens),
            oldest_lag_ms=max((each.oldest_lag_ms for each in tokens), default=0),
            waiting=waiting,
            in_flight=in_flight,
            tokens=tokens,
        )

    def old_tokens(self) -> int:
        """Count the zones whose token is of another ring than the present one."""
        return self._old_tokens(int(self._database.run("load_instance")[0][2]))[1]

    def _old_tokens(self, ring_size: int) -> tuple[int, int]:
        """Count all zones, and those of another ring: databases can't all hash, so it is done here.

        Those that come and go meanwhile may be missed, or counted though they are gone.
        """
        queue, zone = -1, b""
        zones = old = 0
        while True:
            rows = self._database.run("page_tokens", queue=queue, zone=zone, count=PAGE)
            zones += len(rows)
            old += sum(token != token_of(q, z, ring_size) for q, z, token in rows)
            if len(rows) < PAGE:
                return zones, old
            queue, zone, _ = rows[-1]
