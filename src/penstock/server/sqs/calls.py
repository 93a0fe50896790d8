"""What the operations share: where they work, and who asks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock import limits
from penstock.wire.sqs.faults import SqsFault
from penstock.wire.sqs.queues import arn_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.clock import Clock
    from penstock.server.batcher import Desk
    from penstock.server.http.messages import Request
    from penstock.server.security import Principal
    from penstock.server.sqs.attempts import Attempts
    from penstock.server.sqs.catalog import Catalog
    from penstock.wire.sqs.requests import (
        DeleteEntry,
        OnQueue,
        SendEntry,
        VisibilityEntry,
    )

__all__ = ["Call", "Place", "SqsOptions", "check_entries", "check_token", "failed_entry"]


class SqsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the service is set up.

    ``url`` is what queue URLs begin with; without it, the address that the request came to.
    ``done_retention_ms`` is how long queues that are made here remember deleted messages.
    """

    account: str = "000000000000"
    region: str = "us-east-1"
    url: str = ""
    done_retention_ms: int = 3_600_000


class Place(NamedTuple):
    """Where operations work."""

    desk: Desk
    catalog: Catalog
    clock: Clock
    options: SqsOptions
    store_id: int
    attempts: Attempts

    def arn(self, name: str) -> str:
        """Name a queue as policies do."""
        return arn_of(self.options.region, self.options.account, name)


class Call(NamedTuple):
    """One request: from whom, by which address, and as it came."""

    principal: Principal
    base_url: str
    http: Request
    consumer: str

    def queue_of(self, request: OnQueue) -> str:
        """Return the name of the queue that a request is about."""
        url = request.queue_url
        if not url:
            # Clients of the query protocol post to the queue's own address.
            url = self.http.path if len(self.http.path) > 1 else None
        if not url:
            raise SqsFault.missing("QueueUrl")
        return url.rstrip("/").rpartition("/")[2]

    def url_of(self, name: str) -> str:
        """Return the URL of a queue."""
        return f"{self.base_url}{name}"


# SQS takes letters, digits and punctuation of ASCII in them.
_TOKEN: Final = re.compile(r"[!-~]{1,128}")
_ID_CHARS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


def check_entries(
    entries: Sequence[SendEntry] | Sequence[DeleteEntry] | Sequence[VisibilityEntry] | None,
    kind: str,
) -> None:
    """Check a batch's number of entries and their ids."""
    if not entries:
        raise SqsFault(
            "EmptyBatchRequest",
            f"There should be at least one {kind}RequestEntry in the request.",
        )
    if len(entries) > limits.SQS_MAX_BATCH:
        raise SqsFault(
            "TooManyEntriesInBatchRequest",
            f"Maximum number of entries per request are {limits.SQS_MAX_BATCH}. "
            f"You have sent {len(entries)}.",
        )
    seen = set()
    for entry in entries:
        if entry.id is None:
            raise SqsFault.missing(f"{kind}RequestEntry.Id")
        if not entry.id or len(entry.id) > 80 or not _ID_CHARS.issuperset(entry.id):
            raise SqsFault(
                "InvalidBatchEntryId",
                "A batch entry id can only contain alphanumeric characters, hyphens and "
                "underscores. It can be at most 80 letters long.",
            )
        if entry.id in seen:
            raise SqsFault("BatchEntryIdsNotDistinct", f"Id {entry.id} repeated.")
        seen.add(entry.id)


def check_token(text: str | None, parameter: str) -> None:
    """Check a group, a dedup id or the id of a receive, if it is given."""
    if text is not None and not _TOKEN.fullmatch(text):
        raise SqsFault.value(
            text,
            parameter,
            f"{parameter} can only include alphanumeric and punctuation characters. 1 to 128 in "
            "length.",
        )


def failed_entry(entry_id: str | None, fault: SqsFault) -> dict[str, object]:
    """Say of an entry of a batch why it failed."""
    return {
        "Id": entry_id,
        "SenderFault": fault.sender,
        "Code": fault.query_code,
        "Message": fault.message,
    }
