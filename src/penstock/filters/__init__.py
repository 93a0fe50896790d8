"""Filters: the condition on a message's attributes that defines a queue.

A filter is a SQL boolean expression, the part of it that JMS calls a message selector::

    kind = 'book' AND (price BETWEEN 10 AND 20 OR "sale.code" LIKE 'A!_%' ESCAPE '!')

It is true, false or unknown, and takes a message only if it is true. An attribute that a message
does not have is null, and values of different types never compare: both make a comparison
unknown, not an error. ``group``, ``priority``, ``published_at`` (milliseconds) and ``size``
(bytes) read the message itself; every other name is an attribute. Names are case-sensitive, and
stand in double quotes if they are not plain words.

::

    text ──parser──▶ tree ──evaluate──▶ one filter, one message
                       └────matcher───▶ every filter, a batch of messages

This package owns the language and the matching. The router and the stores act on a match.
"""

from __future__ import annotations

from penstock.filters.matcher import Filter, Matcher, default_filter, explain, parse
from penstock.filters.tree import Row, RowTuple, canonical
from penstock.model import Explanation, Value

__all__ = [
    "Explanation",
    "Filter",
    "Matcher",
    "Row",
    "RowTuple",
    "Value",
    "canonical",
    "default_filter",
    "explain",
    "parse",
]
