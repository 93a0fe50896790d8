"""The life-cycle log: a record for each step in the life of messages, by logger ``penstock.life``.

Stores write a record after the commit of a verb, for each queue and lease that it touched. They ask
``if life.level`` first: the log is on only if this logger was itself given a level, and costs no
call otherwise. A record holds ids, never a payload or an attribute.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

life: Final = logging.getLogger("penstock.life")
# The most message ids of a record; its count is of all.
MOST_IDS: Final = 20


def log_step(
    event: str,
    queue: str,
    message_ids: Sequence[int],
    lease: str = "",
    consumer: str = "",
    reason: str = "",
) -> None:
    """Write the record of a step that messages of a queue have taken together, if there are any."""
    if not message_ids or not life.isEnabledFor(logging.INFO):
        return
    fields: dict[str, Any] = {
        "event": event,
        "queue": queue,
        "count": len(message_ids),
        "messages": list(message_ids[:MOST_IDS]),
    }
    told = {"lease": lease, "consumer": consumer, "reason": reason}
    fields |= {name: value for name, value in told.items() if value}
    text = fields_text({name: value for name, value in fields.items() if name != "event"})
    life.info("%s %s", event, text, extra={"fields": fields})


def log_publish(message_ids: Iterable[int], routes: Iterable[Sequence[str]]) -> None:
    """Write a record for each queue that messages went into; for those without one, queue ""."""
    by_queue: dict[str, list[int]] = {}
    for message_id, names in zip(message_ids, routes, strict=True):
        for name in names or ("",):
            by_queue.setdefault(name, []).append(message_id)
    for name, ids in by_queue.items():
        log_step("publish", name, ids)


def fields_text(fields: Mapping[str, Any]) -> str:
    """Write fields as ``name=value``; text that would blur the line is quoted: it is of clients."""
    return " ".join(f"{name}={_shown(value)}" for name, value in fields.items())


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    text = str(value)
    return text if text.isprintable() and not set(text) & {" ", '"', "'"} else repr(text)
