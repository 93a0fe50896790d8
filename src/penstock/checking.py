"""Checking a store while its broker has it open: ``penstock check`` and ``Broker.check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import InvalidInput
from penstock.stores.audit import AuditReport, audit
from penstock.stores.kvstore import KvStore

if TYPE_CHECKING:
    from penstock.broker import Broker

__all__ = ["AuditReport", "check", "check_store"]


def check_store(store: object, *, repair: bool, now_ms: int) -> AuditReport:
    """Audit a store; the caller holds the broker's lock."""
    if not isinstance(store, KvStore):
        raise InvalidInput("only key-value stores can be checked")
    return audit(store, repair=repair, now_ms=now_ms)


def check(broker: Broker, *, repair: bool = False) -> AuditReport:
    """Check every invariant of a broker's store; with ``repair``, mend what can be mended.

    Other callers wait meanwhile: an audit reads the whole store.
    """
    with broker._lock:  # noqa: SLF001 - an audit is a verb that lives beside the broker
        now_ms = broker._now_ms()  # noqa: SLF001
        report = check_store(broker._store, repair=repair, now_ms=now_ms)  # noqa: SLF001
        broker._after_change()  # noqa: SLF001
        number = broker._store.commits  # noqa: SLF001
    broker._committer.wait(number)  # noqa: SLF001
    return report
