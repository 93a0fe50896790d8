"""The audit of leases: each has its expiry entry, and holds what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.errors import CorruptRecord
from penstock.store.check_report import Kind, all_of
from penstock.store.codec.stored import LeaseRecord, decode_lease, encode_lease

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.store.check_report import Findings
    from penstock.store.kv.check.census import ActiveAudit

__all__ = ["check_leases"]

_LEASE_BYTES: Final = 16


class _Leases:
    def __init__(
        self,
        findings: Findings,
        active: ActiveAudit,
        flight: Mapping[int, dict[int, bytes]],
        floors_ms: Mapping[int, int],
    ) -> None:
        self._findings = findings
        self._floors_ms = floors_ms
        self._active = active
        # queue number -> {key in flight: its lease}; what leases list is taken out
        self._flight = flight

    def scan(self) -> int:
        """Check every lease; give how many expiry entries they account for."""
        findings, expected = self._findings, 0
        for name, value in all_of(findings.table("leases")):
            findings.count("leases")
            try:
                lease = decode_lease(value)
                if len(name) != _LEASE_BYTES:
                    raise CorruptRecord(f"a lease's key has {len(name)} bytes, not 16")  # noqa: TRY301
            except CorruptRecord as error:
                findings.reject(Kind.UNDECODABLE, "leases", name, value, str(error))
                continue
            expected += self._check(name, lease)
        return expected

    def _check(self, name: bytes, lease: LeaseRecord) -> bool:
        """Check a lease; say whether its expiry entry is there."""
        findings = self._findings
        index_key = lease.expiry_ms.to_bytes(8, "big") + name
        entry = findings.table("lease_expiry").get(index_key)
        if lease.queue not in findings.core.by_number:
            text = f"a lease of queue number {lease.queue}, which is not there"
            findings.violate(Kind.STRANGER, "leases", name, text)
            self._delete(name, index_key)
            return entry is not None
        kept = self._held(name, lease)
        if not kept:
            if not lease.ids:
                findings.violate(Kind.EMPTY, "leases", name, "a lease without messages")
            self._delete(name, index_key)
            return entry is not None
        claimed_at_ms = min(lease.claimed_at_ms, self._floors_ms[lease.queue])
        right = lease._replace(index_key=index_key, claimed_at_ms=claimed_at_ms)
        if lease != right:
            text = (
                "a lease that names another expiry entry than its own, or that time has yet to see"
            )
            findings.violate(Kind.WRONG_FIELD, "leases", name, text)
        if lease != right._replace(ids=kept):
            self._put(name, right._replace(ids=kept))
        if entry != name:
            kind = Kind.MISSING_ENTRY if entry is None else Kind.WRONG_FIELD
            what = "no expiry entry" if entry is None else "an expiry entry that names another"
            findings.violate(kind, "lease_expiry", index_key, f"a lease with {what}")
            findings.put("lease_expiry", index_key, name)
        return entry is not None

    def _held(self, name: bytes, lease: LeaseRecord) -> list[bytes]:
        """Give the messages of a lease that are in flight under it."""
        flight = self._flight.get(lease.queue, {})
        queue = self._findings.core.by_number[lease.queue]
        kept = []
        for id8 in lease.ids:
            key = int.from_bytes(id8, "big")
            if flight.get(key) == name:
                del flight[key]
                kept.append(id8)
                continue
            text = f"queue {queue.name}: the lease lists {key}, which is not in flight under it"
            self._findings.violate(Kind.NOT_HELD, "leases", name, text)
        return kept

    def _put(self, name: bytes, lease: LeaseRecord) -> None:
        self._findings.put("leases", name, encode_lease(*lease))

    def _delete(self, name: bytes, index_key: bytes) -> None:
        self._findings.delete("leases", name)
        self._findings.delete("lease_expiry", index_key)

    def check_orphans(self, expected: int) -> None:
        """Look for expiry entries without a lease, if there are more entries than leases."""
        findings = self._findings
        entries = sum(1 for _ in all_of(findings.table("lease_expiry")))
        findings.count("expiry entries", entries)
        if entries == expected:
            return
        for key, _ in all_of(findings.table("lease_expiry")):
            value = findings.table("leases").get(key[8:])
            try:
                expiry_ms = None if value is None else decode_lease(value).expiry_ms
            except CorruptRecord:
                expiry_ms = None
            if expiry_ms is None or key[:8] != expiry_ms.to_bytes(8, "big"):
                text = "an expiry entry without a lease that ends then"
                findings.violate(Kind.ORPHAN_ENTRY, "lease_expiry", key, text)
                findings.delete("lease_expiry", key)

    def check_strays(self) -> None:
        """Put messages back that are in flight under no lease; list those that one forgot."""
        findings = self._findings
        for number, flight in self._flight.items():
            queue = findings.core.by_number[number]
            by_lease: dict[bytes, list[int]] = {}
            for key, name in flight.items():
                by_lease.setdefault(name, []).append(key)
                table, place = self._active.place(queue, key, in_flight=True)
                text = f"queue {queue.name}: no live lease lists {key}, which is in flight"
                findings.violate(Kind.STRAY, table, place, text)
            if not by_lease or not findings.repair:
                continue
            findings.flush()
            for name, keys in by_lease.items():
                lease = self._live(name, number)
                if lease is None:
                    self._active.put_back(queue, self._floors_ms[number], keys)
                else:
                    ids = [*lease.ids, *(key.to_bytes(8, "big") for key in keys)]
                    self._put(name, lease._replace(ids=ids))

    def _live(self, name: bytes, queue: int) -> LeaseRecord | None:
        value = self._findings.table("leases").get(name)
        try:
            lease = None if value is None else decode_lease(value)
        except CorruptRecord:
            return None
        return lease if lease is not None and lease.queue == queue else None


def check_leases(
    findings: Findings,
    active: ActiveAudit,
    flight: Mapping[int, dict[int, bytes]],
    floors_ms: Mapping[int, int],
) -> None:
    """Check leases, expiry entries, and that what is in flight is held by a lease.

    ``flight`` has, by queue number, the keys in flight with their leases; it is emptied.
    """
    leases = _Leases(findings, active, flight, floors_ms)
    expected = leases.scan()
    leases.check_orphans(expected)
    leases.check_strays()
