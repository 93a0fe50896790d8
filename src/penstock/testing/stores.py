"""Stores for the suites: opened by URL, closed, and opened again with everything in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from penstock import urls
from penstock.broker.broker import Broker
from penstock.engines.memory import MemoryEngine
from penstock.store.kv.store import KvStore
from penstock.testing.suite.base import Suite

if TYPE_CHECKING:
    from penstock.clock import Clock

__all__ = ["OnUrl", "Reopenable"]


class Reopenable:
    """Opens the store that ``url`` names, and opens it again.

    ``memory:`` stores keep their tables between the two, which :func:`penstock.open` does not
    do: this way a test without a disk can check what a restart keeps.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._engine: MemoryEngine | None = None
        self._design = url.partition("design=")[2] or urls.DEFAULT_DESIGN
        if url.startswith("memory:"):
            self._engine = MemoryEngine(urls.DESIGNS[self._design])
        self._clock: Clock | None = None
        self._options: dict[str, Any] = {}
        self.broker: Broker | None = None

    @property
    def design(self) -> str:
        """The name of the storage design."""
        return self._design

    def open(self, clock: Clock, **options: Any) -> Broker:
        """Open the store; ``options`` are those of :func:`penstock.open`."""
        self._clock, self._options = clock, options
        if self._engine is None:
            self.broker = urls.open(self._url, clock=clock, **options)
        else:
            routing = options.get("routing")
            store = urls.make_store(self._engine, self._design, clock, routing)
            own = {
                name: value
                for name, value in options.items()
                if name not in {"durability", "routing"}
            }
            self.broker = Broker(store, clock=clock, **own)
        return self.broker

    def reopen(self) -> Broker:
        """Close the broker and open the same store with the same options."""
        assert self._clock is not None, "open() comes first"
        self.close()
        return self.open(self._clock, **self._options)

    def close(self) -> None:
        """Close the broker, if one is open."""
        if self.broker is not None:
            self.broker.close()
            self.broker = None


class OnUrl(Suite):
    """Runs a suite on a store URL; ``{place}`` in it stands for the test's directory."""

    url: ClassVar[str]

    def open(self, clock: Clock, **options: Any) -> Broker:
        """Open a new store."""
        self._opened = Reopenable(self.url.format(place=self.place))
        return self._opened.open(clock, **options)

    def reopen(self) -> Broker:
        """Open it again."""
        return self._opened.reopen()

    def open_as(self, **options: Any) -> Broker:
        """Open it again with other options."""
        self._opened.close()
        return self._opened.open(self.clock, **options)

    def payload_kept(self, message_id: int) -> bool | None:
        """Look into the payload table of a key-value store."""
        store = self.broker._store  # noqa: SLF001 - no verb shows a payload that nobody refers to
        if isinstance(store, KvStore):
            return store.payloads.get([message_id]) != [None]
        return None
