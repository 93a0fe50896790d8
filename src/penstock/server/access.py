"""The keys and the certificate of a process that serves, or stands by; both are read again."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.server.config import authenticates
from penstock.server.keys import Keys
from penstock.server.security import PageGuard
from penstock.server.tls import ServerTls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.server.config import Config
    from penstock.server.connections import Listener
    from penstock.server.metrics import Gauge

log = logging.getLogger(__name__)

_WATCH_SECONDS: Final = 2.0


class Access:
    """Keys, certificate, and the listeners that use them; InvalidInput if a file can't be used."""

    def __init__(self, config: Config) -> None:
        self.keys = Keys(Path(config.auth_keys)) if authenticates(config) else None
        self.tls = ServerTls(config)
        self.listeners: dict[str, Listener] = {}
        self._url = config.sqs_url

    def guard(self, listener: str, host: str) -> PageGuard | None:
        """Return the check of headers for a listener of HTTP; None: it asks for keys."""
        if listener == "ops":
            return PageGuard(host)
        return PageGuard(host, self._url) if self.keys is None else None

    def gauges(self) -> Iterator[Gauge]:
        """Give the gauges of keys and certificate; any thread may ask."""
        about = "When the first certificate of a file expires."
        yield "certificate_expiry_timestamp_seconds", about, self.tls.expiry, "file"
        used = {} if self.keys is None else self.keys.former_used
        about = "When the former secret of a key with two was last used; 0: not yet."
        yield "key_former_secret_used_timestamp_seconds", about, used, "key"

    def reload(self) -> None:
        """Read keys and certificate again; a file that can't be used changes nothing."""
        if self.keys is not None:
            self.keys.reload()
        if self.tls.reload():
            for name, listener in self.listeners.items():
                listener.tls = self.tls.context(name)
            if "flight" in self.listeners:
                log.warning(
                    "Flight keeps the certificate that it has until the server is restarted"
                )

    async def watch_keys(self) -> None:
        """Read the keys again whenever their file has changed."""
        while self.keys is not None:
            await asyncio.sleep(_WATCH_SECONDS)
            self.keys.refresh()
