"""``penstock salvage``: copies everything that can be read of a damaged store into a new one.

1. Salvage copies rows as they are, table by table, so that ids, attempts, history, leases and the
   log stay what they were. It makes lost records anew that a store can't be opened without.
2. The audit makes derived rows anew, and puts messages without a payload into the quarantine.
3. Salvage puts messages that have a payload, and whose record in a queue is lost, into their
   queues again by the metadata log. Messages that the log does not know either come into a queue
   named ``salvaged``.

Of a message that is found done and live, *done* is kept. But where a row can't be read, an older
version of it may be found instead, so that a message which was done can come back.
"""

from __future__ import annotations

import contextlib
import tempfile
from array import array
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.clock import Clock, SystemClock
from penstock.engines import rows_of
from penstock.errors import CorruptRecord, InvalidUrl, StoreDamaged
from penstock.filters import parse
from penstock.model import Ordering, QueueSpec, State
from penstock.readers import fill_directory, locate, make_engine
from penstock.store.codec.metadata import Metadata, decode_metadata, encode_metadata, read_metadata
from penstock.store.codec.opendata import PAYLOAD, parse_entry_key, payload_key, read_terminated
from penstock.store.codec.records import decode_lease, decode_queue_spec
from penstock.store.kv.check import audit, held_ids
from penstock.store.kv.queues import Counts, Queue, QueueTable, decode_counts
from penstock.store.kv.state import FORMAT, Identity
from penstock.store.live import Item, lane_of
from penstock.store.transfer import gather_pages
from penstock.urls import DESIGNS, make_store

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from penstock.filters import Filter
    from penstock.salvage.source import Damage, SalvageSource
    from penstock.store.kv.store import KvStore

__all__ = ["SalvageReport", "SalvagedQueue", "Unreadable", "salvage"]

_END: Final = b"\xff" * 16
_META, _CURSOR, _QUARANTINE = b"meta", b"\x02\x12", b"\x02\x0f"
_SPEC, _COUNTS, _REFERENCES, _DONE = b"\x02\x06", b"\x02\x0b", b"\x02\x0d", b"\x02\x03"
_BY_NUMBER: Final = {"available", "in_progress"}
_BY_NAME: Final = {"buckets", "history"}
# The queue of messages whose own queue is unknown.
_SALVAGED: Final = "salvaged"


class Unreadable(msgspec.Struct, frozen=True):
    """Unreadable rows: the file, the table, the keys that they lie between, and the reason."""

    file: str
    table: str | None
    between: str
    why: str


class SalvagedQueue(msgspec.Struct, kw_only=True):
    """A queue of the new store, with its messages by state.

    ``expected`` is their number by the queue's own counters; None if those are lost. The log has
    brought ``put_back`` of them back. ``lost`` has the ids, as ranges from first to last, of
    messages that were in the queue for certain and are not in the new store.
    """

    name: str
    expected: int | None
    found: dict[str, int]
    put_back: int
    lost: list[tuple[int, int]]
    settings_lost: bool


class SalvageReport(msgspec.Struct, kw_only=True):
    """The messages that a salvage has brought over, and those that it has not."""

    rows: dict[str, int]
    queues: list[SalvagedQueue]
    unreadable: list[Unreadable]
    repaired: dict[str, int]
    notes: list[str]

    @property
    def complete(self) -> bool:
        """Whether everything was there: all rows could be read, and nothing had to be repaired."""
        return not self.unreadable and not self.repaired


def salvage(
    source: str,
    target: str,
    *,
    drop_after: bool = False,
    clock: Clock | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SalvageReport:
    """Copy what can be read of the store at ``source`` into a new one at ``target``.

    The source is not changed. The target is there whole or, if salvage raises, not at all.
    ``drop_after`` leaves out what the write-ahead log has behind its first damage, so that the
    result is the store as it was at that moment.
    """
    with _new_store(target) as (url, scratch):
        found = open_source(source, scratch, drop_after=drop_after)
        with contextlib.closing(found):
            return _Salvage(found, url, clock or SystemClock()).run(progress)


def open_source(url: str, scratch: Path, *, drop_after: bool = False) -> SalvageSource:
    """Open a damaged store for reading; nothing of it is changed."""
    location = locate(url)
    if isinstance(location, Path):
        from penstock.salvage.rocksdb import RocksSource  # noqa: PLC0415 - needs rocksdict

        return RocksSource(location, scratch, drop_after=drop_after)
    from penstock.salvage.slatedb import SlateSource  # noqa: PLC0415 - an extra

    return SlateSource(location, scratch, drop_after=drop_after)


@contextlib.contextmanager
def _new_store(target: str) -> Iterator[tuple[str, Path]]:
    """Give a URL whose store becomes the target if all goes well, and a scratch directory."""
    scheme, _, rest = target.partition(":")
    place, question, query = rest.partition("?")
    slashes = "" if scheme == "rocksdb" else "//"
    path = Path(place.removeprefix(slashes)).absolute()
    if scheme == "slatedb+s3":
        with tempfile.TemporaryDirectory(prefix="penstock-salvage-") as scratch:
            yield target, Path(scratch)
        return
    if scheme not in {"rocksdb", "slatedb+file"} or not place.strip("/"):
        raise InvalidUrl(
            f"{target!r:.200} can't be salvaged to: rocksdb:PATH, slatedb+file:///DIR and "
            "slatedb+s3://BUCKET/PREFIX can"
        )
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InvalidUrl(f"{path} is not empty: a store is salvaged to where nothing is")
    with (
        fill_directory(path) as partial,
        # Beside the target: it may need as much room.
        tempfile.TemporaryDirectory(prefix=f"{path.name}.salvage-", dir=path.parent) as scratch,
    ):
        yield f"{scheme}:{slashes}{partial}{question}{query}", Path(scratch)


class _CopiedRows:
    """Notes from rows while they are copied: queues, and the messages that they must have."""

    def __init__(self) -> None:
        self.identity = False
        self.routed_by_pipeline = False
        self.store_id: int | None = None
        # Queues: the names of those with settings by number, the counters of those that have them,
        # names found elsewhere; by number, how many live messages a queue has.
        self.specs: dict[int, str] = {}
        self.counts: dict[str, Counts] = {}
        self.names: set[str] = set()
        self.live: dict[int, int] = {}
        self.fifo_numbers: set[int] = set()
        # By number of the queue, messages that an index or a lease names.
        self.listed: dict[int, array[int]] = {}

    def take(self, table: str, key: bytes, value: bytes) -> str | None:
        """Note a row; return the fault of a row that would keep a store from opening."""
        try:
            self._note(table, key, value)
        except (CorruptRecord, msgspec.MsgspecError, ValueError) as error:
            return str(error)
        return None

    def _note(self, table: str, key: bytes, value: bytes) -> None:
        if table in _BY_NUMBER:
            number = int.from_bytes(key[:4], "big")
            self.live[number] = self.live.get(number, 0) + 1
        elif table in _BY_NAME:
            self.names.add(read_terminated(key, 2)[0].decode())
        elif table == "visibility_index":
            number = int.from_bytes(key[1:5], "big")
            self._list(number, key[-8:])
            if key[:1] == b"\1" and key[-16:-8] == bytes(8):
                self.fifo_numbers.add(number)
        elif table == "leases":
            lease = decode_lease(value)
            for message_key in lease.ids:
                self._list(lease.queue, message_key)
        elif table == "queues" and key[:2] == _SPEC:
            self.specs[decode_queue_spec(value)[1]] = key[2:].decode()
        elif table == "queues" and key[:2] == _COUNTS:
            self.counts[key[2:].decode()] = decode_counts(value)
        elif table == "log" and self.store_id is None and key[:2] == b"\x03\x01":
            with contextlib.suppress(CorruptRecord, IndexError, ValueError):
                self.store_id = int(parse_entry_key(key)[1].split(b"/")[1], 16)
        elif table == "default":
            self.routed_by_pipeline |= key.startswith(_CURSOR)
            if key == _META:
                msgspec.msgpack.decode(value, type=Identity)
                self.identity = True

    def _list(self, number: int, message_key: bytes) -> None:
        self.listed.setdefault(number, array("Q")).append(int.from_bytes(message_key, "big"))

    def queues_without_spec(self) -> Iterator[tuple[str, int, Ordering]]:
        """Name the queues whose settings are lost; a name that is lost too is made up."""
        names = sorted((self.names | set(self.counts)) - set(self.specs.values()))
        numbers = [number for number in sorted(self.live) if number not in self.specs]
        free = max([0, *self.specs, *numbers]) + 1
        for at, name in enumerate(names):
            counts = self.counts.get(name, Counts())
            live = counts.available + counts.delayed + counts.in_flight
            fitting = [number for number in numbers if self.live[number] == live]
            # Only the number of its messages tells which name had which number.
            number = fitting[0] if len(fitting) == 1 else free + at
            yield name, number, self._ordering(number)
            numbers = [each for each in numbers if each != number]
        yield from ((f"{_SALVAGED}-{number}", number, self._ordering(number)) for number in numbers)

    def _ordering(self, number: int) -> Ordering:
        return Ordering.FIFO if number in self.fifo_numbers else Ordering.STANDARD


class _Salvage:
    """One salvage, from a damaged store into a new one."""

    def __init__(self, source: SalvageSource, url: str, clock: Clock) -> None:
        self._source = source
        self._clock = clock
        self._design = "buckets" if "buckets" in source.tables else "indexed"
        self._seen = _CopiedRows()
        self._rows: dict[str, int] = {}
        self._settings_lost: set[str] = set()
        # By queue: messages that were in it for certain.
        self._lost: dict[str, set[int]] = {}
        # By queue: how many messages were put into it again.
        self._put_back: dict[str, int] = {}
        self._now_ms = clock.now_ms()
        self._engine = make_engine(url, self._design)

    def run(self, progress: Callable[[int, int], None] | None) -> SalvageReport:
        """Copy, complete and repair."""
        try:
            self._copy(progress or (lambda _done, _total: None))
            self._complete()
            report = self._mend(make_store(self._engine, self._design, self._clock))
            self._engine.sync()
        finally:
            self._engine.close()
        return report

    # --- rows ------------------------------------------------------------------------------

    def _copy(self, progress: Callable[[int, int], None]) -> None:
        tables = DESIGNS[self._design]
        for at, table in enumerate(tables):
            progress(at, len(tables))
            if table not in self._source.tables:
                text = "nothing is left that says which rows are of this table"
                self._source.add_damage("", text, table)
                continue
            family = self._engine.table(table).family
            for rows in _pages(self._source.rows(table)):
                batch = self._engine.batch()
                for key, value in rows:
                    wrong = self._seen.take(table, key, value)
                    if wrong is None or table not in {"default", "queues"}:
                        batch.put(key, value, family)
                    else:
                        self._source.notes.append(f"{table} {key.hex()} was left out: {wrong}")
                self._rows[table] = self._rows.get(table, 0) + len(batch)
                self._engine.commit(batch)
        progress(len(tables), len(tables))

    def _complete(self) -> None:
        """Make lost records anew that a store can't be opened without."""
        seen, batch = self._seen, self._engine.batch()
        if not seen.identity:
            store_id = seen.store_id or int.from_bytes(self._clock.lease_id()[-4:], "big")
            routing = "pipeline" if seen.routed_by_pipeline else "inline"
            identity = Identity(FORMAT, self._design, store_id, self._now_ms, routing)
            record = msgspec.msgpack.encode(identity)
            batch.put(_META, record, self._engine.table("default").family)
            self._source.notes.append("the store's identity is lost and was made anew")
        queues = QueueTable(self._engine.table("queues"))
        for name, number, ordering in seen.queues_without_spec():
            spec = QueueSpec(name=name, filter=f"queue = '{name}'", ordering=ordering)
            queues.put_spec(batch, Queue(spec, number, Counts()))
            self._settings_lost.add(name)
        if len(batch):
            self._engine.commit(batch)

    # --- messages --------------------------------------------------------------------------

    def _mend(self, store: KvStore) -> SalvageReport:
        now_ms = self._now_ms = max(self._clock.now_ms(), store.info().time_floor_ms)
        expected = {
            name: sum(_states(queue.counts).values())
            for name, queue in store.by_name.items()
            if name in self._seen.counts
        }
        before, references = set(self._quarantined()), self._references()
        first = last = audit(store, repair=True, now_ms=now_ms, keep_payloads=True)
        self._note_expelled(store, before)
        self._restore(store, references)
        if first.found or self._put_back:
            last = audit(store, repair=True, now_ms=now_ms)
        if not last.ok:
            raise StoreDamaged(f"{last.left} violations are left: {last.violations[:3]}")
        self._note_unlisted(store)
        return SalvageReport(
            rows=self._rows,
            queues=[
                SalvagedQueue(
                    name=name,
                    expected=expected.get(name),
                    found=_states(queue.counts),
                    put_back=self._put_back.get(name, 0),
                    lost=_ranges(self._lost.get(name, ())),
                    settings_lost=name in self._settings_lost,
                )
                for name, queue in sorted(store.by_name.items())
            ],
            unreadable=[
                Unreadable(each.file, each.table, self._between(each), each.text)
                for each in dict.fromkeys(self._source.damage)
            ],
            repaired=first.found,
            notes=list(dict.fromkeys(self._source.notes)),
        )

    def _quarantined(self) -> Iterator[bytes]:
        rows = rows_of(self._engine.table("default"), _QUARANTINE, _QUARANTINE + _END)
        return (key[2:] for key, _ in rows)

    def _note_expelled(self, store: KvStore, before: Collection[bytes]) -> None:
        """Note the messages that the audit has quarantined because their payload is lost."""
        done = 0
        for aside in self._quarantined():
            table, _, key = aside.partition(b"\0")
            if aside in before or table.decode() not in _BY_NUMBER | _BY_NAME:
                continue
            if table.decode() in _BY_NAME:
                name = read_terminated(key, 2)[0].decode()
            else:
                name = store.by_number[int.from_bytes(key[:4], "big")].name
            if key.startswith(_DONE):
                done += 1
            else:
                self._lost.setdefault(name, set()).add(int.from_bytes(key[-8:], "big"))
        if done:
            self._source.notes.append(f"{done} done messages have lost their payload")
        damaged = {each.table for each in self._source.damage}
        if self._lost and damaged & {None, *_BY_NUMBER, *_BY_NAME}:
            self._source.notes.append(
                "of the messages that are given as lost some may have been done and gone: rows "
                "that would tell can't be read"
            )

    def _note_unlisted(self, store: KvStore) -> None:
        """Note the messages that an index or a lease names, and that no queue has now."""
        damaged = {each.table for each in self._source.damage}
        if self._design != "indexed" or damaged & {None, "visibility_index", "leases"}:
            # Where rows are lost, older ones may be out of date. With buckets there is no index,
            # and leases name messages by other numbers.
            return
        held = held_ids(store, now_ms=self._now_ms)
        for number, ids in self._seen.listed.items():
            queue = store.by_number.get(number)
            if queue is not None:
                lost = {each for each in ids if not _has(held[queue.name], each)}
                self._lost.setdefault(queue.name, set()).update(lost)

    def _restore(self, store: KvStore, references: Mapping[int, int]) -> None:
        """Put messages whose payload is there into the queues that have lost them.

        ``references`` says how many queues had a message, if not one.
        """
        held = held_ids(store, now_ms=self._now_ms)
        absent: set[int] = set()
        without_queue: dict[int, bytes | None] = {}
        prefix = PAYLOAD
        for key, _ in rows_of(self._engine.table("payloads"), prefix, prefix + _END, page=64):
            message_id = int.from_bytes(key[2:], "big")
            holders = sum(_has(ids, message_id) for ids in held.values())
            if holders < references.get(message_id, 1):
                absent.add(message_id)
                if not holders:
                    without_queue[message_id] = None
        if not absent:
            return
        for message_id, _ in _log_rows(store, routed=False):
            absent.discard(message_id)
            without_queue.pop(message_id, None)
        compiled: dict[str, Filter] = {}
        for rows in _pages(row for row in _log_rows(store, routed=True) if row[0] in absent):
            without_queue.update((each, encoded) for each, encoded in rows if each in without_queue)
            for queue in list(store.by_name.values()):
                items = [
                    _item(message_id, encoded)
                    for message_id, encoded in rows
                    if not _has(held[queue.name], message_id)
                    and _had(queue, message_id, encoded, compiled)
                ]
                self._enqueue(store, queue, items)
                for item in items:
                    without_queue.pop(item.message_id, None)
        if without_queue:
            self._keep_without_queue(store, without_queue)

    def _keep_without_queue(self, store: KvStore, messages: Mapping[int, bytes | None]) -> None:
        """Put messages whose queue is unknown into a queue of their own."""
        if _SALVAGED not in store.by_name:
            spec = QueueSpec(name=_SALVAGED, filter=f"queue = '{_SALVAGED}'")
            store.create_queue(spec, self._now_ms)
        queue = store.queue(_SALVAGED)
        payloads = self._engine.table("payloads")
        for rows in _pages((each, messages[each] or b"") for each in sorted(messages)):
            items = []
            for message_id, known in rows:
                size = len(payloads.get(payload_key(message_id)) or b"")
                nothing = encode_metadata(Metadata(self._now_ms, "", 0, size, 0, {}))
                items.append(_item(message_id, known or nothing))
            self._enqueue(store, queue, items)

    def _enqueue(self, store: KvStore, queue: Queue, items: Sequence[Item]) -> None:
        if items:
            batch = self._engine.batch()
            store.enqueue(batch, queue, items, self._now_ms, late=True)
            store.commit(batch, (queue,), self._now_ms)
            self._put_back[queue.name] = self._put_back.get(queue.name, 0) + len(items)

    def _references(self) -> dict[int, int]:
        rows = rows_of(self._engine.table("payloads"), _REFERENCES, _REFERENCES + _END)
        return {int.from_bytes(key[2:], "big"): int.from_bytes(value, "big") for key, value in rows}

    def _between(self, damage: Damage) -> str:
        if damage.table is None:
            return ""
        ends = [self._describe(damage.table, key) for key in (damage.begin, damage.end or b"")]
        return f"{ends[0] or 'the first key'} to {ends[1] or 'the last key'}"

    def _describe(self, table: str, key: bytes) -> str:
        """Show a key to an operator: its queue and message, if it has them."""
        number = int.from_bytes(key[:4], "big")
        if table in _BY_NUMBER and len(key) >= 12:
            name = self._seen.specs.get(number, f"number {number}")
            return f"queue {name} message {int.from_bytes(key[4:12], 'big')}"
        if table == "payloads" and len(key) >= 10:
            return f"message {int.from_bytes(key[2:10], 'big')}"
        if table in _BY_NAME and len(key) > 3:
            with contextlib.suppress(CorruptRecord, UnicodeDecodeError):
                return f"queue {read_terminated(key, 2)[0].decode()} {key[-8:].hex()}"
        return key.hex()


def _pages(rows: Iterable[tuple[Any, bytes]]) -> Iterator[list[tuple[Any, bytes]]]:
    """Split rows into lists that one commit each can take."""
    return gather_pages((row, len(row[1]), 0) for row in rows)


def _log_rows(store: KvStore, *, routed: bool) -> Iterator[tuple[int, bytes]]:
    """Read the part of the log that has been routed, or the rest."""
    log, cursors = store.log, store.log_stats().cursors
    for number in range(log.all_logs):
        cursor = log.end if store.info().routing == "inline" else cursors[number]
        at, end = (log.earliest, cursor) if routed else (cursor, log.end)
        for entry in log.entries(number, at, end):
            yield from entry


def _had(queue: Queue, message_id: int, encoded: bytes, compiled: dict[str, Filter]) -> bool:
    """Whether a queue has had a message: by its coverage, or else by its filter."""
    found = read_metadata(encoded)
    if found is None:
        return False
    row = (found.attributes, found.group, found.priority, found.published_at_ms, found.size)
    coverage = queue.coverage
    if (coverage.known_from or 0) <= message_id:
        return coverage.had(row, message_id, compiled)
    return parse(queue.spec.filter).matches(row)


def _item(message_id: int, encoded: bytes) -> Item:
    found = decode_metadata(encoded)
    lane = lane_of(found.group, found.priority)
    visible_at_ms = found.published_at_ms + found.delay_ms
    return Item(message_id, message_id, lane, 0, 0, visible_at_ms, encoded)


def _has(ids: Sequence[int], message_id: int) -> bool:
    """Whether sorted ids have one among them."""
    at = bisect_left(ids, message_id)
    return at < len(ids) and ids[at] == message_id


def _states(counts: Counts) -> dict[str, int]:
    return {state.value: getattr(counts, state.value) for state in State}


def _ranges(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Join ids that follow upon each other."""
    found: list[tuple[int, int]] = []
    for each in sorted(ids):
        if found and found[-1][1] == each - 1:
            found[-1] = (found[-1][0], each)
        else:
            found.append((each, each))
    return found
