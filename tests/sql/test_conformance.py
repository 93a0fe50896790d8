"""The SQL store passes the suites that every store passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from penstock.store.sql.store import SqlStore
from penstock.testing.conformance import BrokerConformance
from penstock.testing.routing import RoutingConformance
from penstock.testing.stores import Reopenable
from penstock.testing.suite.base import Suite
from penstock.testing.suite.delivery import DeliverySuite
from penstock.testing.suite.fifo import FifoSuite
from penstock.testing.suite.restarting import WaitingSuite

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sql.postgres import PostgresServer

    from penstock.broker.broker import Broker
    from penstock.clock import Clock


class OnPostgres(Suite):
    """Opens the store of a test: a database for each of its places."""

    options: ClassVar[str] = ""

    @pytest.fixture(autouse=True)
    def _with_postgres(self, postgres: PostgresServer) -> Iterator[None]:
        self.postgres = postgres
        yield
        postgres.forget_places()

    def open(self, clock: Clock, **options: Any) -> Broker:
        self._opened = Reopenable(self.postgres.emptied(str(self.place)) + self.options)
        return self._opened.open(clock, **options)

    def reopen(self) -> Broker:
        return self._opened.reopen()

    def open_as(self, **options: Any) -> Broker:
        self._opened.close()
        return self._opened.open(self.clock, **options)

    def payload_kept(self, message_id: int) -> bool | None:
        store = self.broker._store
        assert isinstance(store, SqlStore)
        return bool(store.database.run("payload_of", message_ids=[message_id]))


class TestPostgres(OnPostgres, BrokerConformance):
    pass


class TestPostgresWithTokens(OnPostgres, DeliverySuite, FifoSuite, WaitingSuite):
    """Pointers under many tokens are served as if they were under one."""

    options = "?ring_size=16"


class TestPostgresRouting(OnPostgres, RoutingConformance):
    """The suite begins with one log, and changes the number."""

    options = "?logs=1"
