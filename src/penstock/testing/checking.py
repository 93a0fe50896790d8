"""One line for the end of a test: the store that it leaves behind is as it should be."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.broker.broker import Broker

__all__ = ["assert_clean"]

_SHOWN = 20


def assert_clean(broker: Broker) -> None:
    """Audit the broker's store and fail with what is wrong, record by record.

    ::

        with penstock.open("memory:") as broker:
            ...
            assert_clean(broker)
    """
    report = broker.check()
    if not report.clean:
        total = sum(report.found.values())
        lines = [
            f"{each.kind} in {each.table}, key {each.key}: {each.text}"
            for each in report.violations[:_SHOWN]
        ]
        raise AssertionError("\n  ".join([f"{total} violations in the store:", *lines]))
