"""Why a message is, or is not, in a queue: the facts that a store tells, and what they say.

A store keeps no record of the purge, the move or the retention that has removed a message. The
facts say that the message was there, and which of the three can have removed it.
"""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock import limits
from penstock.errors import QueueNotFound, StoreDamaged
from penstock.filters import Row, explain, parse
from penstock.model import (
    Attempt,
    Cause,
    Entry,
    LogRecord,
    LogStats,
    MessageExplanation,
    QueueSpec,
    QueueStats,
    State,
)
from penstock.store.kv.store import MOST_BUCKETS
from penstock.store.policy import Coverage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock.filters import RowTuple
    from penstock.model import Explanation
    from penstock.store.contract import FullStore

# Setting of a queue: the messages that it is about.
_RETENTIONS: Final = {
    "done_retention_ms": "done",
    "failed_retention_ms": "failed",
    "unclaimed_retention_ms": "unclaimed",
}


class Facts(msgspec.Struct, kw_only=True):
    """All that a store tells of a message and a queue.

    ``row`` is None if nothing is known of the message, ``log_number`` if no log that may be read
    has it. ``is_held_up``: the log can't be read at its offset yet. ``can_fill``: a backfill would
    look at its offset. ``may_miss``: the store has not looked everywhere in the queue.
    ``has_duplicates``: publishes have repeated dedup ids; ``is_damaged``: records were put aside.
    Without ``reads_log`` neither is told.
    """

    message_id: int
    now_ms: int
    spec: QueueSpec
    coverage: Coverage
    entry: Entry | None
    attempts: list[Attempt]
    row: Row | None
    stats: QueueStats
    has_duplicates: bool
    is_damaged: bool
    log: LogStats
    log_number: int | None
    is_held_up: bool
    reads_log: bool
    can_fill: bool
    may_miss: bool
    # The queues whose filters take the message now, and those that have it.
    takers: list[str] = []
    elsewhere: dict[str, State] = {}
    looked: int = 0
    queues: int = 0


# --- asking the store -----------------------------------------------------------------------------


def row_of(message: Entry | LogRecord) -> Row:
    """Return a message as filters see it."""
    return Row(
        message.attributes, message.group, message.priority, message.published_at_ms, message.size
    )


def explain_message(
    look: Callable[[Callable[[int], Any]], Any],
    store: FullStore,
    takers: Callable[[RowTuple], list[str]],
    queue: str,
    message_id: int,
    may_see: Callable[[str | None], bool] = lambda _: True,
) -> MessageExplanation:
    """Ask a store for the facts, and explain them; others are let in between two queues.

    ``look`` reads the store, told the time, while nobody else is let in. ``takers`` names the
    queues whose filters take a message. ``may_see`` says of a queue, or (None) of the log, whether
    it may be told of.
    """
    facts = look(partial(_read_queue, store, queue, message_id, reads_log=may_see(None)))
    live = look(lambda _: store.queues())
    specs = {each.spec.name: each.spec for each in live if may_see(each.spec.name)}
    if facts.row is not None:
        facts.takers = takers(facts.row)
    names = likely_queues(queue, facts.takers, specs)
    facts.looked, facts.queues = min(len(names), limits.MAX_PLACES), len(names)
    found = {}
    for name in names[: limits.MAX_PLACES]:
        # A queue that was deleted since has no place, and damage to another is not asked about.
        with suppress(QueueNotFound, StoreDamaged):
            entry = look(partial(_find, store, name, message_id)) if name != queue else None
            if entry is not None:
                found[name] = entry
    facts.elsewhere = {name: entry.state for name, entry in found.items()}
    if facts.row is None and found:
        facts.row = row_of(next(iter(found.values())))
        facts.takers = takers(facts.row)
    return explain_facts(facts)


def likely_queues(queue: str, takers: Iterable[str], specs: Mapping[str, QueueSpec]) -> list[str]:
    """Name all queues, those first that are the likeliest to have a message.

    These are a queue, the queues whose filters take the message, and their dead letter queues.
    """
    likely = dict.fromkeys([queue, *takers])
    for name in (following := list(likely)):
        dead_letter = specs[name].dead_letter if name in specs else ""
        if dead_letter and dead_letter not in likely:
            likely[dead_letter] = None
            following.append(dead_letter)
    return [name for name in dict.fromkeys([*likely, *specs]) if name in specs]


def _find(store: FullStore, queue: str, message_id: int, now_ms: int) -> Entry | None:
    page = store.browse(
        queue,
        State.AVAILABLE,
        limit=1,
        cursor=None,
        payloads=False,
        now_ms=now_ms,
        message_id=message_id,
    )
    return next(iter(page), None)


def _find_in_log(
    store: FullStore, log: LogStats, message_id: int
) -> tuple[int | None, LogRecord | None, bool]:
    """Find the log of a message, and its record; or say whether the logs can't be read there."""
    is_held_up = False
    for number in log.cursors:
        page = store.read_log(number, message_id, 1)
        for record in page.records:
            if record.message_id == message_id:
                return number, record, False
        # Where the number of logs has changed, until all of them are routed up to there.
        is_held_up = is_held_up or page.cursor.end <= message_id
    return None, None, is_held_up


def _read_queue(
    store: FullStore, queue: str, message_id: int, now_ms: int, *, reads_log: bool
) -> Facts:
    # A store that is shared reads the coverage anew for a plan.
    plan = store.backfill_plan(queue, message_id, min(message_id + 1, limits.MAX_OFFSET))
    queues = {each.spec.name: each for each in store.queues()}
    live = queues.get(queue)
    if live is None:
        # Another process has just deleted it.
        raise QueueNotFound.among(queue, queues)
    log, totals = store.log_stats(), store.store_stats()
    entry = _find(store, queue, message_id, now_ms)
    stats = store.queue_stats(queue, now_ms)
    number: int | None = None
    about: Entry | LogRecord | None = entry
    is_held_up = False
    if entry is None and reads_log and log.earliest <= message_id < log.end:
        number, about, is_held_up = _find_in_log(store, log, message_id)
    waiting = stats.available + stats.delayed + stats.in_flight
    return Facts(
        message_id=message_id,
        now_ms=now_ms,
        spec=live.spec,
        coverage=deepcopy(live.coverage),
        entry=entry,
        attempts=[] if entry is None else store.attempts(queue, message_id, now_ms),
        row=None if about is None else row_of(about),
        stats=stats,
        has_duplicates=reads_log and totals.duplicates_total > 0,
        is_damaged=reads_log and totals.quarantined_total + totals.unreadable_total > 0,
        log=log,
        log_number=number,
        is_held_up=is_held_up,
        reads_log=reads_log,
        can_fill=bool(plan.stretches) and not live.draining,
        may_miss=store.info().design == "buckets" and waiting > MOST_BUCKETS,
    )


# --- what follows ---------------------------------------------------------------------------------


def explain_facts(facts: Facts) -> MessageExplanation:
    """Explain facts. This reads nothing."""
    spec, row = facts.spec, facts.row
    now = then = None
    filter_then = facts.coverage.filter_at(facts.message_id)
    if row is not None:
        now = explain(parse(spec.filter), row)
        if filter_then is not None and filter_then != spec.filter:
            then = explain(parse(filter_then), row)
    if facts.entry is not None:
        cause, said = _present(facts)
    else:
        cause, said = _absent(facts, now, then)
        said += _doubts(facts) if cause not in {Cause.NO_MESSAGE, Cause.NOT_ROUTED} else []
    return MessageExplanation(
        queue=spec.name,
        message_id=facts.message_id,
        cause=cause,
        text=" ".join(said),
        entry=facts.entry,
        attempts=facts.attempts,
        filter=now,
        filter_then=then,
        counts_from=_counts_from(facts),
        elsewhere=facts.elsewhere,
        looked=facts.looked,
        queues=facts.queues,
    )


def _counts_from(facts: Facts) -> int | None:
    live = facts.coverage.live
    return live[-1].begin if live and live[-1].end is None else None


def _is_unrouted(facts: Facts) -> bool:
    """Whether a message is in the log and no pipeline has come to it."""
    log, message_id = facts.log, facts.message_id
    if facts.log_number is not None and log.routing == "pipeline":
        return message_id >= log.cursors[facts.log_number]
    return log.routed_up_to <= message_id < log.end


def _is_forgotten(facts: Facts) -> bool:
    """Whether the queue no longer knows which filters counted at the message's offset."""
    return facts.message_id < (facts.coverage.known_from or 0)


def _was_backfilled(facts: Facts) -> bool:
    """Whether a backfill has looked at the message's offset by a filter that takes it."""
    row = facts.row
    return row is not None and any(
        stretch.covers(facts.message_id) and parse(stretch.filter).matches(row)
        for stretch in facts.coverage.backfilled
    )


def _present(facts: Facts) -> tuple[Cause, list[str]]:
    """Say how a message came into the queue that has it."""
    assert facts.entry is not None
    assert facts.row is not None
    has = f"Queue {facts.spec.name} has it ({facts.entry.state.value.replace('_', ' ')})"
    then = facts.coverage.filter_at(facts.message_id)
    if then is not None and parse(then).matches(facts.row):
        return Cause.TAKEN, [f"{has}: {_whose(facts)} took it."]
    if _was_backfilled(facts):
        return Cause.BACKFILLED, [f"{has}: a backfill brought it in."]
    if _is_forgotten(facts):
        return Cause.FORGOTTEN, [f"{has}. How it came is not known any more.", _known(facts)]
    text = f"{has}, though no filter that counted at its offset takes it: it was moved there"
    pipeline = facts.log.routing == "pipeline"
    return Cause.MOVED_IN, [text + (", or a pipeline has assigned it." if pipeline else ".")]


def _absent(
    facts: Facts, now: Explanation | None, then: Explanation | None
) -> tuple[Cause, list[str]]:
    """Say why a queue does not have a message."""
    message_id, log, live = facts.message_id, facts.log, facts.coverage.live
    lacks = f"Queue {facts.spec.name} does not have it"
    if now is None:
        return _unknown(facts, lacks)
    counted = facts.coverage.filter_at(message_id) is not None
    if counted and (then or now).result is True:
        if _is_unrouted(facts):
            text = f"{lacks} yet: {_whose(facts)} takes it, and the log is routed up to offset"
            return Cause.NOT_ROUTED, [f"{text} {log.routed_up_to}."]
        return Cause.REMOVED, _removal(facts, _whose(facts))
    if _was_backfilled(facts):
        return Cause.REMOVED, _removal(facts, "a backfill")
    if _is_forgotten(facts):
        return Cause.FORGOTTEN, [f"{lacks}. Whether it had it is not known.", _known(facts)]
    if now.result is not True:
        also = "" if then is None else ", nor did the one that it had then"
        return Cause.NOT_TAKEN, [f"{lacks}: its filter does not take it{also}."]
    if counted:
        text = f"{lacks}: the filter that it had then did not take it. Its present filter does,"
        said = [text, f"and counts from offset {_counts_from(facts)} on.", *_fill(facts)]
        return Cause.NOT_TAKEN, said
    if live and live[0].begin <= message_id:
        text = f"{lacks}: it is draining, and has taken no message from offset {live[-1].end} on."
        return Cause.DRAINING, [text]
    begin = live[0].begin if live else log.end
    text = f"{lacks}: it takes messages from offset {begin} on, and this one is older."
    deleted = "A queue of this name that was deleted before took its messages with it."
    return Cause.TOO_EARLY, [text, *_fill(facts), deleted]


def _unknown(facts: Facts, lacks: str) -> tuple[Cause, list[str]]:
    """Say why nothing is known of a message that the queue does not have."""
    log, message_id = facts.log, facts.message_id
    if not facts.reads_log:
        needed = "it takes a key with consume or admin on all queues to ask it."
        return Cause.HIDDEN, [f"{lacks}. The log may tell why: {needed}"]
    if message_id >= log.end:
        return Cause.NO_MESSAGE, [f"No message has this id yet: the log ends at offset {log.end}."]
    if message_id < 1:
        return Cause.NO_MESSAGE, ["No message has this id: ids begin at 1."]
    if facts.is_held_up:
        routed = f"no pipeline has come to its offset, but to {log.routed_up_to}."
        return Cause.NOT_ROUTED, [f"{lacks}: {routed}"]
    if message_id >= log.earliest:
        said = ["No message has this id: ids have gaps, and this is one."]
        if facts.is_damaged:
            said = ["No message has this id: it is one of the gaps between ids, or was damaged."]
        return Cause.NO_MESSAGE, said
    kept = f"the log is kept from offset {log.earliest} on, and no queue that was looked at has it."
    said = [f"{lacks}, and its attributes are not known any more: {kept}"]
    coverage = facts.coverage
    stretches = [*coverage.live, *coverage.backfilled]
    counted = {each.filter: None for each in stretches if each.covers(message_id)}
    if _is_forgotten(facts):
        said.append(_known(facts))
    elif counted:
        either = " or ".join(counted)
        said.append(f"If it satisfied {either}, it was in the queue and was removed.")
    else:
        said.append("No filter of the queue counted at its offset.")
    return Cause.FORGOTTEN, said


def _whose(facts: Facts) -> str:
    same = facts.coverage.filter_at(facts.message_id) == facts.spec.filter
    return "its filter" if same else "the filter that it had then"


def _known(facts: Facts) -> str:
    return f"The queue knows what it has had from offset {facts.coverage.known_from} on."


def _fill(facts: Facts) -> list[str]:
    if facts.can_fill:
        return ["A backfill brings it in, if its payload is still there."]
    if facts.message_id < facts.log.earliest:
        return ["The log no longer has it; a backfill from an archive can bring it in."]
    return []


def _removal(facts: Facts, by: str) -> list[str]:
    """Say that a message was removed, and which verbs can have done that."""
    spec, stats = facts.spec, facts.stats
    assert facts.row is not None
    age_ms = facts.now_ms - facts.row.published_at_ms
    verbs = []
    if stats.removed_total:
        verbs = [
            f"retention, if it was {state} ({setting} is {kept_ms})"
            for setting, state in _RETENTIONS.items()
            if 0 < (kept_ms := getattr(spec, setting)) <= age_ms
        ]
        verbs.append("a purge")
    if stats.moved_out_total:
        verbs.append("a move to another queue")
    if facts.is_damaged:
        verbs.append("damage, which 'penstock check' tells of")
    said = [f"Queue {spec.name} had it, by {by}, and has it no longer."]
    if facts.log.routing == "pipeline":
        said = [f"Queue {spec.name} had it, by {by}, unless its pipeline has left it out."]
    if by == "a backfill":
        said = [f"A backfill took it for queue {spec.name}, unless its payload was gone by then."]
    if verbs:
        said.append(
            f"The store does not record what removed it. It can have been: {'; '.join(verbs)}."
        )
    else:
        said.append("The queue has counted no removal and no move.")
    said += [
        f"Queue {name} has it, though its filter does not take it: it was moved there."
        for name in facts.elsewhere
        if name not in facts.takers
    ]
    return said


def _doubts(facts: Facts) -> list[str]:
    """Say which other explanations the facts do not rule out."""
    said = []
    if facts.may_miss:
        looked = f"Only {MOST_BUCKETS} buckets of the queue were looked at"
        said.append(f"{looked}: those where messages of its age mostly are.")
    if facts.has_duplicates:
        said.append(
            "If a publish with a repeated dedup id has returned this id: the store has kept the "
            "first message alone."
        )
    return said
