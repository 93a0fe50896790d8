"""The audit: checks the invariants that no constraint can state, and repairs the tables.

All statements run in one transaction that keeps publishes out (it holds ``log_head``). Other verbs
of other processes go on: rows that they commit between two statements may look like damage. An
audit that finds anything therefore looks twice, and reports what both have found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.store.check_report import KEPT, AuditReport, Kind, Violation

if TYPE_CHECKING:
    from penstock.store.sql.session import Session


class Check(NamedTuple):
    """One invariant: the statement that finds rows that break it, and the one that mends them."""

    kind: Kind
    table: str
    text: str
    find: str
    mend: str | None


CHECKS: Final = (
    Check(Kind.COUNTER, "queue_counts", "a counter does not match its rows", "wrong_counts",
          "mend_counts"),
    Check(Kind.ORPHAN_ENTRY, "pointers", "Q_C and the pointer index differ", "pointers_apart",
          "mend_pointers_apart"),
    Check(Kind.MISSING_ENTRY, "pointers", "a zone has items and no pointer", "zones_unpointed",
          None),
    Check(Kind.EARLY, "pointers", "a pointer vests later than its zone's earliest item",
          "pointers_late", "mend_pointers_late"),
    Check(Kind.REFERENCES, "messages", "a message's references do not match its queues",
          "wrong_refs", "mend_refs"),
    Check(Kind.PAYLOAD_MISSING, "messages", "a queue holds a message that is not there",
          "messages_missing", "mend_messages_missing"),
    Check(Kind.TWICE, "items", "a message is live, and done or failed as well", "items_twice",
          "mend_items_twice"),
    Check(Kind.STRANGER, "items", "a row belongs to no queue", "rows_of_no_queue",
          "mend_rows_of_no_queue"),
    Check(Kind.ORPHAN_ATTEMPT, "attempts", "attempts at a message that the queue does not have",
          "attempts_orphaned", "mend_attempts_orphaned"),
    Check(Kind.GARBAGE, "messages", "a message below the log that no queue holds",
          "messages_garbage", "mend_messages_garbage"),
    Check(Kind.SEQUENCE, "log_head", "the log has messages beyond its end", "log_beyond_end",
          "mend_log_beyond_end"),
    Check(Kind.WRONG_FIELD, "items", "an item's marks contradict each other", "items_marked_wrong",
          "mend_items_marked_wrong"),
)  # fmt: skip


def audit(core: Session, *, repair: bool, now_ms: int) -> AuditReport:
    """Check every invariant; with ``repair``, mend the rows that can be mended and look again."""
    first = _read(core, now_ms)
    if first:
        # Rows that another process was just committing are sound the second time.
        again = set(_read(core, now_ms))
        first = [each for each in first if each in again]
    left, rounds = first, 1
    while repair and left and rounds < 4:
        core.change(lambda: _mend(core, {each.kind for each in left}, now_ms))  # noqa: B023
        left = _read(core, now_ms)
        rounds += 1
    if repair and first:
        core.reload()
        for queue in core.queues.values():
            core.wake(queue)
    still = {(each.kind, each.key) for each in left}
    found: dict[str, int] = {}
    for each in first:
        found[each.kind] = found.get(each.kind, 0) + 1
    counted = core.database.run("count_rows")[0]
    return AuditReport(
        checked=dict(zip(("queues", "items", "done", "failed", "messages", "zones"), counted,
                         strict=True)),
        found=found,
        violations=[
            Violation(v.kind, v.table, v.key, v.text,
                      repaired=repair and (v.kind, v.key) not in still)
            for v in first[:KEPT]
        ],
        notes=[],
        left=len(left),
        rounds=rounds,
    )  # fmt: skip


def _read(core: Session, now_ms: int) -> list[Violation]:
    def work() -> list[Violation]:
        core.lock_head()
        if core.database.dialect == "postgresql":
            # These read whole tables, unlike all others.
            core.database.execute("SET LOCAL enable_seqscan = on")
        found = []
        for check in CHECKS:
            for key, told in core.database.run(check.find, **_parameters(core, check.find, now_ms)):
                text = f"{check.text}: {told}"
                found.append(Violation(check.kind, check.table, bytes(key).hex(), text))
        return found

    found: list[Violation] = core.change(work)
    return found


def _mend(core: Session, kinds: set[Kind], now_ms: int) -> None:
    core.lock_head()
    for check in CHECKS:
        if check.kind not in kinds:
            continue
        if check.mend is not None:
            core.database.run(check.mend, **_parameters(core, check.mend, now_ms))
        else:
            core.zones.ensure(
                {
                    (row[0], row[1]): row[2]
                    for row in core.database.run("unpointed_zones")
                    if row[0] in core.by_number
                },
                now_ms,
            )
    version = core.database.run("bump_zones")[0][0]
    core.head = core.head._replace(zones_version=version)


def _parameters(core: Session, name: str, now_ms: int) -> dict[str, int]:
    known = {
        "now_ms": now_ms,
        "threshold_ms": core.tunables.threshold_ms,
        "cool_ms": core.tunables.cool_ms,
        "slot": core.slot,
    }
    return {each: known[each] for each in core.database.parameters(name)}
