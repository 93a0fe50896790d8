"""Settings of a queue as callers give them: a checked spec, and the rules between queues."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.errors import InvalidQueue, QueueExists, QueueNotFound, did_you_mean
from penstock.model import Ordering, Overflow, QueueSpec
from penstock.store.policy import drops_oldest
from penstock.validation import check_spec

if TYPE_CHECKING:
    from penstock.store.contract import FullStore, LiveQueue

_SETTINGS: Final = frozenset(QueueSpec.__struct_fields__) - {"created_at_ms", "version"}


def settings_of(spec: QueueSpec) -> dict[str, Any]:
    """Return the settings of a queue that a caller can give."""
    return {name: getattr(spec, name) for name in _SETTINGS}


def make_spec(settings: dict[str, Any], name: str) -> QueueSpec:
    """Make a spec of settings that a caller has given; refuse what is wrong with them."""
    unknown = sorted(set(settings) - _SETTINGS)
    if unknown:
        hint = did_you_mean(unknown[0], _SETTINGS - {"name"})
        raise InvalidQueue(f"a queue has no setting {unknown[0]!r:.100}; {hint}")
    words: dict[str, type[Ordering | Overflow]] = {"ordering": Ordering, "overflow": Overflow}
    for setting in words.keys() & settings:
        with suppress(ValueError):
            settings[setting] = words[setting](settings[setting])
    spec = check_spec(QueueSpec(**{**settings, "name": name}))
    # A copy: the caller may change his own labels from here on.
    return msgspec.structs.replace(spec, labels=dict(spec.labels))


def find_queue(store: FullStore, name: str) -> LiveQueue | None:
    """Return a queue, or None; looks through all of them only if there is one of the name."""
    try:
        store.spec(name)
    except QueueNotFound:
        return None
    return next((queue for queue in store.queues() if queue.spec.name == name), None)


def check_same_settings(present: QueueSpec, asked: QueueSpec) -> None:
    """Refuse to make a queue that is there with other settings; say which."""
    there, wanted = (msgspec.to_builtins(settings_of(each)) for each in (present, asked))
    other = "; ".join(
        f"{name} is {there[name]!r:.100} there, {wanted[name]!r:.100} was asked for"
        for name in sorted(there)
        if there[name] != wanted[name]
    )
    if other:
        kept = present.ordering is not asked.ordering
        hint = "its ordering can't be changed" if kept else "use update_queue()"
        raise QueueExists(f"queue {asked.name!r} exists with other settings: {other}; {hint}")


def check_dead_letter(store: FullStore, spec: QueueSpec) -> None:
    """Refuse a dead letter queue that could not take failed messages."""
    if not spec.dead_letter:
        return
    known = find_queue(store, spec.dead_letter)
    if known is None:
        raise InvalidQueue(
            f"no queue named {spec.dead_letter!r}: a dead letter queue must be made first"
        )
    target = known.spec
    if known.draining:
        raise InvalidQueue(f"queue {target.name!r} is draining: it takes no dead letters")
    if target.ordering is not spec.ordering:
        raise InvalidQueue(
            f"the dead letter queue of a {spec.ordering.value} queue must be one as well; "
            f"{target.name!r} is {target.ordering.value}"
        )


def check_no_circle(store: FullStore, spec: QueueSpec) -> None:
    """Refuse a queue whose dropped messages would come back to it, to be dropped again."""
    name, passed = spec.dead_letter if drops_oldest(spec) else "", {""}
    while name not in passed:
        passed.add(name)
        if name == spec.name:
            raise InvalidQueue(
                f"what queue {spec.name!r} drops would come back to it from one dead letter queue "
                "to the next, all of which drop their oldest: let one of them refuse"
            )
        with suppress(QueueNotFound):
            target = store.spec(name)
            name = target.dead_letter if drops_oldest(target) else ""
