"""SQS over HTTP: the 23 operations, on a desk.

``service`` takes requests: protocol, who asks, which operation, and what a failure is called.
``sending``, ``receiving``, ``settling``, ``managing`` and ``moving`` are the operations,
``catalog`` is what is known of the queues, ``attempts`` what receives got that may be tried again.
The wire itself is in :mod:`penstock.wire.sqs`.
"""

from __future__ import annotations

from penstock.server.sqs.service import SqsOptions, SqsService

__all__ = ["SqsOptions", "SqsService"]
