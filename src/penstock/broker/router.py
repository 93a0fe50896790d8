"""A tailing process in small: routes a store whose routing is ``pipeline``, without Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.filters import Matcher, parse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.broker.broker import Broker
    from penstock.model import LogPage


def route_once(broker: Broker, *, limit: int = 10_000) -> int:
    """Route what the logs hold, up to about ``limit`` messages of each; return how many were read.

    Safe to call at any time, from any number of threads at once: what was routed before is not
    routed again.
    """
    read = 0
    matcher: Matcher[str] = Matcher()
    matched_by: Mapping[str, str] = {}
    # Messages that come in meanwhile are for the next call, or this one might never end.
    stats = broker.log_stats()
    for log in stats.cursors:
        routed = 0
        while routed < limit:
            page = broker.read_log(log, limit=limit - routed)
            if page.cursor.begin >= min(stats.end, page.cursor.end):
                break
            if page.filters != matched_by:
                matched_by = page.filters
                matcher = Matcher({name: parse(text) for name, text in matched_by.items()})
            broker.assign(log, page.cursor, match_page(page, matcher))
            routed += len(page.records)
        read += routed
    return read


def match_page(page: LogPage, matcher: Matcher[str]) -> dict[int, list[str]]:
    """Match a page of the log: which queues each message goes to; those of none are left out."""
    routes = matcher.match(
        [
            (record.attributes, record.group, record.priority, record.published_at_ms, record.size)
            for record in page.records
        ]
    )
    return {
        record.message_id: names
        for record, names in zip(page.records, routes, strict=True)
        if names
    }
