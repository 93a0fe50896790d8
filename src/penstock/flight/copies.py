"""A served store as the source of a copy: its parts in record batches, one in each."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from penstock.flight.protocol import CopyTicket, encode
from penstock.store.transfer import CopyPage, CopyStart, read_pages, read_start

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.flight.client import FlightStore
    from penstock.store.snapshot import PinnedStore

COPY_SCHEMA: Final = pa.schema([pa.field("part", pa.binary(), nullable=False)])


def copy_batches(pinned: PinnedStore, wanted: CopyTicket) -> Iterator[pa.RecordBatch]:
    """Read what a ticket wants."""
    start = read_start(pinned)
    yield _batch(start)
    if wanted.section is not None:
        start.at_ms = wanted.at_ms or start.at_ms
        for page in read_pages(pinned, start, wanted.section, wanted.rows):
            yield _batch(page)


def _batch(part: CopyStart | CopyPage) -> pa.RecordBatch:
    return pa.record_batch([[msgspec.msgpack.encode(part)]], schema=COPY_SCHEMA)


class ServedSource:
    """A store that a server reads, as of the moment at which it was asked."""

    def __init__(self, client: FlightStore, snapshot: str) -> None:
        self._client, self._snapshot = client, snapshot
        (start,) = self._parts()
        assert isinstance(start, CopyStart)
        self.start = start

    @classmethod
    @contextmanager
    def hold(cls, location: str) -> Iterator[ServedSource]:
        """Ask a server to hold a snapshot meanwhile."""
        # Imported here: the service has no client.
        from penstock.flight.client import FlightStore  # noqa: PLC0415

        client = FlightStore(location)
        held = client.hold_snapshot()
        try:
            yield cls(client, held.snapshot)
        finally:
            client.drop_snapshot(held.snapshot)

    def pages(self, section: int = 0, rows: int = 0) -> Iterator[CopyPage]:
        """Read pages from a row of a section on."""
        for part in self._parts(section=section, rows=rows, at_ms=self.start.at_ms):
            if isinstance(part, CopyPage):
                yield part

    def _parts(self, **wanted: Any) -> Iterator[CopyStart | CopyPage]:
        for batch in self._client.read(encode(CopyTicket(self._snapshot, **wanted))):
            for part in batch.column("part"):
                yield msgspec.msgpack.decode(part.as_py(), type=CopyStart | CopyPage)
