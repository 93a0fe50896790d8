"""``penstock copy`` between every two kinds of store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.copying.places import fill, show, work_off

import penstock
from penstock.copying import copy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.sql.postgres import PostgresServer

KINDS = {
    "rocks-indexed": "rocksdb:{path}/{name}?design=indexed",
    "rocks-buckets": "rocksdb:{path}/{name}?design=buckets",
    "slate": "slatedb+file://{path}/{name}",
    "sql": "",
}


class Places:
    """Makes URLs of stores that are not there."""

    def __init__(self, path: Path, request: pytest.FixtureRequest) -> None:
        self._path, self._request = path, request
        self._databases: list[str] = []

    def make(self, kind: str, name: str) -> str:
        if kind != "sql":
            return KINDS[kind].format(path=self._path, name=name)
        server: PostgresServer = self._request.getfixturevalue("postgres")
        self._databases.append(server.create())
        return server.url(self._databases[-1])

    def drop(self) -> None:
        for name in self._databases:
            self._request.getfixturevalue("postgres").drop(name)


@pytest.fixture
def places(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Places]:
    made = Places(tmp_path, request)
    yield made
    made.drop()


@pytest.mark.parametrize("routing", ["inline", "pipeline"])
@pytest.mark.parametrize("target_kind", KINDS)
@pytest.mark.parametrize("source_kind", KINDS)
def test_a_copy_shows_what_the_source_shows(
    places: Places, source_kind: str, target_kind: str, routing: str
) -> None:
    if routing == "pipeline" and source_kind != target_kind:
        pytest.skip("one source of each kind is enough")
    source, target = places.make(source_kind, "source"), places.make(target_kind, "target")
    with penstock.open(source, background=False, routing=routing) as broker:  # type: ignore[arg-type]
        fill(broker)
    report = copy(source, target)
    with penstock.open(source, background=False, create=False) as broker:
        expected = show(broker, copied_at_ms=report.at_ms)
        last = broker.publish([penstock.Message(b"")])[0]
    with penstock.open(target, background=False, create=False) as broker:
        assert broker.check().violations == []
        assert show(broker) == expected
        # Ids go on where those of the source do.
        assert broker.publish([penstock.Message(b"")])[0] <= last
        assert broker.info().store_id == report.target_id != report.source_id
        done = work_off(broker)
        broker.sweep()
        assert broker.check().violations == []
    assert set(done) >= {"orders", "copies", "dead"}
    assert report.in_flight == 2
