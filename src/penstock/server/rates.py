"""How fast a key may publish: messages and bytes of payload a second, whatever the protocol.

A key has the messages and bytes of one second saved up at most. A publish is let in while anything
is left of them, however large it is; what it takes beyond that, the key waits for afterwards. So a
key keeps to its rate over time, and no batch is too large to ever be let in.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from penstock.clock import loop_seconds
from penstock.errors import LimitReached

if TYPE_CHECKING:
    from collections.abc import Callable


class Rate:
    """The rates of one key, for calls from any thread; 0: no limit."""

    def __init__(
        self, messages: int, payload_bytes: int, seconds: Callable[[], float] = loop_seconds
    ) -> None:
        self.limits = {"messages_per_second": messages, "bytes_per_second": payload_bytes}
        self._left = {name: float(limit) for name, limit in self.limits.items()}
        self._seconds = seconds
        self._at = seconds()
        self._lock = threading.Lock()

    def spend(self, key_id: str, messages: int, payload_bytes: int) -> None:
        """Count a publish, or refuse it: LimitReached names the limit and when to come again."""
        with self._lock:
            now = self._seconds()
            passed, self._at = max(0.0, now - self._at), now
            for name, limit in self.limits.items():
                self._left[name] = min(float(limit), self._left[name] + passed * limit)
            for name, limit in self.limits.items():
                if limit and self._left[name] <= 0:
                    wait_ms = int(1_000 * -self._left[name] / limit) + 1
                    raise LimitReached(
                        f"key {key_id!r} publishes too fast: {name}={limit}. Nothing was changed; "
                        f"try again in {wait_ms} ms",
                        retry_after_ms=wait_ms,
                    )
            self._left["messages_per_second"] -= messages
            self._left["bytes_per_second"] -= payload_bytes
