"""The life-cycle log: a record for each step in the life of messages, by logger ``penstock.life``.

Stores write records after the commit of a verb or of a sweep's step, for each queue and lease that
it touched. They ask ``if life.level`` first: the log is on only if this logger was itself given a
level, and costs no call otherwise. A record holds ids, never a payload or an attribute. The table
of all records is in docs/server.md.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

life: Final = logging.getLogger("penstock.life")
# The most message ids of a record, which bounds its line; a step of more messages has several.
MOST_IDS: Final = 100


def log_step(
    event: str,
    queue: str,
    message_ids: Sequence[int],
    lease: str = "",
    consumer: str = "",
    reason: str = "",
    **others: str,
) -> None:
    """Write the records of a step that messages of a queue have taken together, if there are any.

    ``others``: queues that had a part in it.
    """
    if not message_ids or not life.isEnabledFor(logging.INFO):
        return
    told = {**others, "lease": lease, "consumer": consumer, "reason": reason}
    told = {name: value for name, value in told.items() if value}
    for start in range(0, len(message_ids), MOST_IDS):
        ids = list(message_ids[start : start + MOST_IDS])
        fields: dict[str, Any] = {"queue": queue, "count": len(ids), "messages": ids, **told}
        life.info("%s %s", event, fields_text(fields), extra={"fields": {"event": event, **fields}})


def log_move(queue: str, to: str, out: Sequence[int], in_: Sequence[int], *, dead: bool) -> None:
    """Write the records of messages that a move takes out of a queue and puts into another.

    ``dead``: as dead letters. What waits or is in flight in the other queue does not come in again.
    """
    reason = "dead letter" if dead else ""
    log_step("move_out", queue, out, reason=reason, to=to)
    log_step("move_in", to, in_, reason=reason, **{"from": queue})


def log_routes(event: str, message_ids: Iterable[int], routes: Iterable[Sequence[str]]) -> None:
    """Write a record for each queue that messages went into; for those without one, queue ""."""
    by_queue: dict[str, list[int]] = {}
    for message_id, names in zip(message_ids, routes, strict=True):
        for name in names or ("",):
            by_queue.setdefault(name, []).append(message_id)
    for name, ids in by_queue.items():
        log_step(event, name, ids)


def fields_text(fields: Mapping[str, Any]) -> str:
    """Write fields as ``name=value``; text that would blur the line is quoted: it is of clients."""
    return " ".join(f"{name}={_shown(value)}" for name, value in fields.items())


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    text = str(value)
    return text if text.isprintable() and not set(text) & {" ", '"', "'"} else repr(text)
