"""A Flight service that listens: its address, TLS, idle snapshots, and the way it ends."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import pyarrow as pa

from penstock.clock import SystemClock
from penstock.errors import InvalidInput
from penstock.flight.service import FlightService

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.server.keys import Keys
    from penstock.server.metrics import Metrics

log = logging.getLogger(__name__)

JANITOR_MS: Final = 15_000
GRACE_MS: Final = 30_000


class TlsFiles(NamedTuple):
    """Files of certificate, key, and the authority of clients' certificates, if they need any."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def options(self) -> dict[str, Any]:
        """Return the files as options of a Flight server."""
        try:
            pair = self.certificate.read_bytes(), self.key.read_bytes()
            roots = None if self.client_ca is None else self.client_ca.read_bytes()
        except OSError as error:
            raise InvalidInput(f"TLS: {error.filename} can't be read: {error.strerror}") from None
        return {
            "tls_certificates": [pair],
            "verify_client": roots is not None,
            "root_certificates": roots,
        }


class FlightListener:
    """A running Flight service; clients connect to its ``location``."""

    def __init__(
        self,
        broker: Broker,
        host: str,
        port: int,
        clock: Clock,
        *,
        keys: Keys | None = None,
        metrics: Metrics | None = None,
        audited: Callable[[str, str], Broker] | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        scheme = "grpc" if tls is None else "grpc+tls"
        place = f"{scheme}://{_bracketed(host)}:{port}"
        try:
            options = {} if tls is None else tls.options()
            self.service = FlightService(
                broker, place, clock, keys=keys, metrics=metrics, audited=audited, **options
            )
        except pa.ArrowException as error:
            raise InvalidInput(f"can't listen on {host}:{port}: {error}") from error
        self._clock = clock
        self.port: int = self.service.port
        self.location = f"{scheme}://{_bracketed(_reachable(host))}:{self.port}"
        self._closing = threading.Condition()
        self._closed = False
        self._janitor = threading.Thread(
            target=self._tidy, name="penstock-flight-janitor", daemon=True
        )
        self._janitor.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *, grace_ms: int = GRACE_MS) -> None:
        """Take no more calls, wait for those that run, and let go of every snapshot.

        After ``grace_ms`` a read that still goes on gets an error. The broker stays open.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._closing.notify_all()
        self._janitor.join()
        stopping = threading.Thread(target=self.service.shutdown, daemon=True)
        stopping.start()
        stopping.join(grace_ms / 1000)
        if stopping.is_alive():
            log.warning("reads go on after %d ms: they are ended", grace_ms)
        self.service.snapshots.close()
        self.service.spools.close()
        stopping.join(grace_ms / 1000)

    def _tidy(self) -> None:
        """Expire idle snapshots, stages and spools, also when nobody calls."""
        with self._closing:
            while not self._closed:
                self.service.snapshots.expire()
                self.service.stages.expire()
                self.service.spools.expire()
                self._clock.wait(self._closing, JANITOR_MS)


def in_process_server(
    broker: Broker, *, host: str = "127.0.0.1", port: int = 0, clock: Clock | None = None
) -> FlightListener:
    """Serve an open broker from this process, by default on a free port of this machine.

    ::

        with penstock.open("memory:") as broker, in_process_server(broker) as server:
            FlightStore(server.location).info()
    """
    return FlightListener(broker, host, port, clock or SystemClock())


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _reachable(host: str) -> str:
    """Return an address that clients can connect to, for one that listens everywhere."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
