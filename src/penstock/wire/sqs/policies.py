"""Policies and tags: documents that are kept and given back, and the little that is checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock import limits
from penstock.wire.sqs.faults import SqsFault

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["allows_source", "checked_tags", "with_permission", "without_permission"]

_POLICY: Final = "sqs.Policy"
_MAX_ACTIONS: Final = 7
_ACTIONS: Final = frozenset(
    {
        "*",
        "ChangeMessageVisibility",
        "DeleteMessage",
        "GetQueueAttributes",
        "GetQueueUrl",
        "ListDeadLetterSourceQueues",
        "PurgeQueue",
        "ReceiveMessage",
        "SendMessage",
    }
)


def checked_tags(tags: Mapping[str, str], queue: str) -> Mapping[str, str]:
    """Check all tags that a queue is to have."""
    if len(tags) > limits.SQS_MAX_TAGS:
        raise SqsFault.invalid(f"Too many tags added for queue {queue}.")
    for key, value in tags.items():
        if not 1 <= len(key) <= 128:
            raise SqsFault.invalid("Tag keys must be between 1 and 128 characters in length.")
        if len(value) > 256:
            raise SqsFault.invalid("Tag values must be at most 256 characters in length.")
    return tags


def with_permission(
    labels: Mapping[str, str],
    arn: str,
    label: str | None,
    accounts: list[str] | None,
    actions: list[str] | None,
) -> dict[str, str]:
    """Add a statement to the policy among a queue's labels."""
    if not label:
        raise SqsFault.missing("Label")
    policy = _policy(labels) or {
        "Version": "2012-10-17",
        "Id": f"{arn}/SQSDefaultPolicy",
        "Statement": [],
    }
    if any(each.get("Sid") == label for each in _statements(policy)):
        raise SqsFault.value(label, "Label", "Already exists.")
    if not actions:
        raise SqsFault.missing("Actions")
    for action in actions:
        if action not in _ACTIONS:
            raise SqsFault.value(
                f"SQS:{action}",
                "ActionName",
                "Only the queue owner is allowed to invoke this action.",
            )
    if not accounts:
        raise SqsFault.value("[]", "PrincipalId", "Unable to verify.")
    if len(actions) > _MAX_ACTIONS:
        raise SqsFault(
            "OverLimit",
            f"{len(actions)} Actions were found, maximum allowed is {_MAX_ACTIONS}.",
            status=403,
        )
    statement = {
        "Sid": label,
        "Effect": "Allow",
        "Principal": {"AWS": _one_or_all([f"arn:aws:iam::{each}:root" for each in accounts])},
        "Action": _one_or_all([f"SQS:{each}" for each in actions]),
        "Resource": arn,
    }
    policy["Statement"] = [*_statements(policy), statement]
    return {**labels, _POLICY: msgspec.json.encode(policy).decode()}


def without_permission(labels: Mapping[str, str], label: str | None) -> dict[str, str]:
    """Take a statement out of the policy among a queue's labels."""
    if not label:
        raise SqsFault.missing("Label")
    policy = _policy(labels)
    statements = _statements(policy)
    left = [each for each in statements if each.get("Sid") != label]
    if len(left) == len(statements):
        raise SqsFault.value(label, "Label", "can't find label on existing policy.")
    kept = {name: text for name, text in labels.items() if name != _POLICY}
    if left:
        kept[_POLICY] = msgspec.json.encode({**policy, "Statement": left}).decode()
    return kept


def allows_source(labels: Mapping[str, str], source_arn: str) -> bool:
    """Whether a queue takes what fails in another, by its RedriveAllowPolicy."""
    policy = _document(labels.get("sqs.RedriveAllowPolicy", ""))
    permission = policy.get("redrivePermission", "allowAll")
    if permission == "byQueue":
        return source_arn in policy.get("sourceQueueArns", [])
    return bool(permission != "denyAll")


def _policy(labels: Mapping[str, str]) -> dict[str, Any]:
    return _document(labels.get(_POLICY, ""))


def _document(text: str) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(text) if text else {}
    except (msgspec.DecodeError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _statements(policy: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = policy.get("Statement", [])
    found = found if isinstance(found, list) else [found]
    return [each for each in found if isinstance(each, dict)]


def _one_or_all(items: list[str]) -> str | list[str]:
    return items[0] if len(items) == 1 else items
