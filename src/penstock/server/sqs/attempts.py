"""What receives of FIFO queues got, for a while: a client that lost the answer may ask again."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock import limits

if TYPE_CHECKING:
    from penstock.model import Delivery

__all__ = ["Attempts"]

# What a message is taken to weigh beside its payload and attributes.
_MESSAGE_BYTES: Final = 1_024


class _Got(NamedTuple):
    at_ms: int
    deliveries: dict[str, Delivery]


class Attempts:
    """What was received by queue and ReceiveRequestAttemptId; bounded in number, bytes and time.

    What does not fit is forgotten, the oldest first: asked again, such an attempt is a new one.
    """

    def __init__(self) -> None:
        self._got: OrderedDict[tuple[str, str], _Got] = OrderedDict()
        self._by_receipt: dict[str, tuple[str, str]] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._got)

    def find(self, queue: str, attempt: str, now_ms: int) -> list[Delivery]:
        """Return what an attempt got, if it is remembered."""
        got = self._got.get((queue, attempt))
        if got is None or now_ms - got.at_ms > limits.SQS_RECEIVE_ATTEMPT_MS:
            return []
        return list(got.deliveries.values())

    def remember(self, queue: str, attempt: str, deliveries: list[Delivery], now_ms: int) -> None:
        """Keep what an attempt got."""
        key = (queue, attempt)
        self._drop(key)
        self._got[key] = _Got(now_ms, {each.receipt: each for each in deliveries})
        for each in deliveries:
            self._by_receipt[each.receipt] = key
            self.bytes += _weight(each)
        while self._got:
            oldest = next(iter(self._got))
            if (
                now_ms - self._got[oldest].at_ms <= limits.SQS_RECEIVE_ATTEMPT_MS
                and len(self._got) <= limits.SQS_MAX_RECEIVE_ATTEMPTS
                and self.bytes <= limits.SQS_MAX_RECEIVE_ATTEMPT_BYTES
            ):
                break
            self._drop(oldest)

    def forget(self, receipt: str) -> None:
        """Let go of a message that is deleted."""
        key = self._by_receipt.pop(receipt, None)
        if key is None:
            return
        deliveries = self._got[key].deliveries
        self.bytes -= _weight(deliveries.pop(receipt))
        if not deliveries:
            del self._got[key]

    def _drop(self, key: tuple[str, str]) -> None:
        got = self._got.pop(key, None)
        for receipt, each in got.deliveries.items() if got is not None else ():
            del self._by_receipt[receipt]
            self.bytes -= _weight(each)


def _weight(delivery: Delivery) -> int:
    named = sum(len(name) + len(str(value)) for name, value in delivery.attributes.items())
    return _MESSAGE_BYTES + len(delivery.payload) + named
