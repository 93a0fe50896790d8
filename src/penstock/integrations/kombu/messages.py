"""Kombu's names, bindings and messages as Penstock has them. No connection here.

::

    kombu                                 Penstock
    queue celery@host.pidbox              queue celery-host.pidbox-DIGEST
    published to a queue by name          attribute queue
    published to an exchange              attributes exchange, routing_key
    binding of a queue to an exchange     a term of the queue's filter
    headers                               attributes, as far as they are flat and short
    header eta                            delay
    headers penstock_group,               group,
            penstock_dedup_id             dedup id
    the whole message                     payload, as JSON
"""

from __future__ import annotations

import hashlib
import math
import re
from base64 import b64decode
from datetime import datetime
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from kombu.exceptions import ChannelError
from kombu.utils.json import dumps, loads

from penstock import limits
from penstock.errors import InvalidInput
from penstock.filters import canonical, parse
from penstock.filters.tree import Or
from penstock.model import Message
from penstock.validation import check_queue_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.filters.tree import Predicate
    from penstock.model import Delivery, Value

MAX_HEADER_ATTRIBUTES: Final = 32
MAX_HEADER_NAME_CHARS: Final = 64
MAX_HEADER_CHARS: Final = 256
# A pattern with n times # needs 2^n comparisons.
MAX_HASHES: Final = 3
# Headers of kombu and Celery that no filter asks for.
_OWN_HEADERS: Final = frozenset({
    *("argsrepr", "clock", "compression", "eta", "expires", "group", "group_index", "ticket"),
    *("ignore_result", "kwargsrepr", "lang", "meth", "origin", "parent_id", "root_id", "retries"),
    *("replaced_task_nesting", "shadow", "stamped_headers", "stamps", "timelimit"),
    *("penstock_dedup_id", "penstock_group"),
})  # fmt: skip
_DIGEST_CHARS: Final = 12


def queue_name(name: str) -> str:
    """Return the name of the Penstock queue for one of kombu: the same, if it is allowed.

    Else ``-`` takes the place of other characters, and a digest keeps different names apart.
    """
    try:
        return check_queue_name(name)
    except InvalidInput:
        digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_CHARS]
        plain = re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-")
        return f"{plain[: limits.MAX_QUEUE_NAME_CHARS - _DIGEST_CHARS - 1] or 'queue'}-{digest}"


# --- bindings -------------------------------------------------------------------------------------


def binding_of(exchange: str, kind: str, key: str) -> str:
    """Return the filter of messages that an exchange sends to a queue with this binding key."""
    clause = f"exchange = {_quoted(exchange)}"
    words = key.split(".")
    if kind not in {"direct", "topic", "fanout"}:
        raise ChannelError(f"an exchange is direct, topic or fanout, not {kind!r:.100}")
    if kind == "fanout" or (kind == "topic" and key == "#"):
        return clause
    if kind == "direct" or not {"*", "#"}.intersection(words):
        return f"{clause} AND routing_key = {_quoted(key)}"
    plain = [re.sub("([!%_])", r"!\1", word) for word in words]
    if "#" not in words:
        # Each * is a word, and no routing key with more dots than the pattern matches.
        like = _like(".".join("_%" if word == "*" else word for word in plain))
        return f"{clause} AND {like} AND NOT {_like('%' + '.%' * len(words))}"
    if "*" in words or words.count("#") > MAX_HASHES:
        raise ChannelError(
            f"binding key {key!r:.100}: a pattern has any number of *, or up to {MAX_HASHES} #"
        )
    # Each # is no word at all, or any number of words.
    choices = [(None, "%") if word == "#" else (word,) for word in plain]
    likes = [_like(".".join(filter(None, each))) for each in product(*choices)]
    return f"{clause} AND ({' OR '.join(likes)})"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _like(pattern: str) -> str:
    return f"routing_key LIKE {_quoted(pattern)} ESCAPE '!'"


def _terms(text: str) -> list[Predicate]:
    tree = parse(text).tree
    return list(tree.terms) if isinstance(tree, Or) else [tree]


def with_binding(text: str, binding: str) -> str:
    """Add a binding to a filter, unless it has it."""
    terms, term = _terms(text), parse(binding).tree
    return text if term in terms else canonical(Or((*terms, term)))


def without_binding(text: str, binding: str) -> str:
    """Remove a binding from a filter, if it has it."""
    terms, term = _terms(text), parse(binding).tree
    if term not in terms:
        return text
    terms.remove(term)
    if len(terms) > 1:
        return canonical(Or(tuple(terms)))
    return canonical(terms[0]) if terms else "FALSE"


# --- messages -------------------------------------------------------------------------------------


def message_of(raw: Mapping[str, Any], address: Mapping[str, Value], now_ms: int) -> Message:
    """Return the message that carries one of kombu's; ``address`` is where it goes."""
    headers = raw["headers"]
    group, dedup_id = headers.get("penstock_group"), headers.get("penstock_dedup_id")
    if dedup_id is not None and headers.get("retries"):
        # Celery publishes a retry with the headers of the first try; it is no repetition of it.
        dedup_id = f"{dedup_id}#{headers['retries']}"
    return Message(
        dumps(raw).encode(),
        {**attributes_of(headers), **address},
        "" if group is None else str(group),
        min(max(0, int(raw["properties"].get("priority") or 0)), limits.MAX_PRIORITY),
        delay_of(headers.get("eta"), now_ms),
        None if dedup_id is None else str(dedup_id),
    )


def attributes_of(headers: Mapping[str, Any]) -> dict[str, Value]:
    """Return the headers that filters can read; those that are no attribute are left out."""
    fitting = [
        (name, value)
        for name, value in headers.items()
        if name not in _OWN_HEADERS and _is_name(name) and _is_value(value)
    ]
    return dict(fitting[:MAX_HEADER_ATTRIBUTES])


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_HEADER_NAME_CHARS and name.isprintable()


def _is_value(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_HEADER_CHARS and value.isprintable()
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and -(1 << 63) <= value < 1 << 63


def delay_of(eta: object, now_ms: int) -> int:
    """Return for how long a message waits in its queue, by Celery's ``eta``.

    A time that has no zone or can't be read is left to the worker.
    """
    try:
        at = datetime.fromisoformat(eta) if isinstance(eta, str) else None
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        return 0
    return min(max(0, int(at.timestamp() * 1000) - now_ms), limits.MAX_DURATION_MS)


def raw_of(delivery: Delivery, queue: str) -> dict[str, Any]:
    """Return kombu's message of a delivery; one that kombu did not publish is all body."""
    raw: dict[str, Any] = {}
    info: dict[str, Any] = {"exchange": "", "routing_key": queue}
    try:
        raw = loads(delivery.payload.decode())
        if raw["properties"].pop("body_encoding") == "base64":
            raw["body"] = b64decode(raw["body"])
        info.update(raw["properties"]["delivery_info"])
        readable = isinstance(raw["headers"], dict) and isinstance(raw["body"], str | bytes)
    except (ValueError, TypeError, KeyError, AttributeError):
        readable = False
    if not readable:
        raw = {"body": delivery.payload, "content-type": "application/octet-stream"}
        raw |= {"headers": {}, "properties": {}}
    info.update(queue=queue, redelivered=delivery.attempts > 1)
    raw["properties"].update(delivery_tag=delivery.receipt, delivery_info=info)
    return raw


def is_expired(raw: Mapping[str, Any], age_ms: int) -> bool:
    """Whether a message is older than the ``expiration`` that its producer gave it."""
    text = str(raw["properties"].get("expiration") or "")
    return text.isdecimal() and age_ms >= int(text)
