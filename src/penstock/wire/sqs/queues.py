"""Queues: the attributes that SQS has, and the settings and labels that Penstock keeps.

::

    VisibilityTimeout          lease_ms (0 is kept as a label: no lease ends before it begins)
    DelaySeconds               delay_ms
    MessageRetentionPeriod     unclaimed_retention_ms
    RedrivePolicy              max_attempts, dead_letter
    FifoQueue                  ordering
    all others                 labels ``sqs.<name>``, given back as they were
    tags                       label ``sqs.tags``, a JSON object
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from penstock import limits
from penstock.model import Ordering
from penstock.wire.sqs.protocol import SqsFault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.model import QueueSpec, QueueStats
    from penstock.wire.sqs.protocol import SqsRequest

_LABEL: Final = "sqs."
_TAGS: Final = "sqs.tags"
CHANGED_LABEL: Final = "sqs.LastModifiedTimestamp"
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,80}|[A-Za-z0-9_-]{1,75}\.fifo")

# Attribute: its bounds.
_NUMBERS: Final = {
    "DelaySeconds": (0, limits.SQS_MAX_DELAY_S),
    "MaximumMessageSize": (limits.SQS_MIN_MESSAGE_SIZE_BYTES, limits.SQS_MAX_MESSAGE_BYTES),
    # SQS has 60 at least; fewer seconds do no harm and help tests.
    "MessageRetentionPeriod": (1, limits.SQS_MAX_RETENTION_S),
    "ReceiveMessageWaitTimeSeconds": (0, limits.SQS_MAX_WAIT_S),
    "VisibilityTimeout": (0, limits.SQS_MAX_VISIBILITY_S),
    "KmsDataKeyReusePeriodSeconds": (60, 86_400),
}
# Attribute in seconds: the setting that it becomes.
_SETTINGS: Final = {
    "DelaySeconds": "delay_ms",
    "MessageRetentionPeriod": "unclaimed_retention_ms",
    "VisibilityTimeout": "lease_ms",
}
_CHOICES: Final = {
    "FifoQueue": {"true", "false"},
    "ContentBasedDeduplication": {"true", "false"},
    "SqsManagedSseEnabled": {"true", "false"},
    "DeduplicationScope": {"queue", "messageGroup"},
    "FifoThroughputLimit": {"perQueue", "perMessageGroupId"},
}
_DOCUMENTS: Final = ("Policy", "RedrivePolicy", "RedriveAllowPolicy")
_FIFO_ONLY: Final = ("ContentBasedDeduplication", "DeduplicationScope", "FifoThroughputLimit")
_COUNTS: Final = {
    "ApproximateNumberOfMessages": "available",
    "ApproximateNumberOfMessagesNotVisible": "in_flight",
    "ApproximateNumberOfMessagesDelayed": "delayed",
}
_SETTABLE: Final = frozenset({*_NUMBERS, *_CHOICES, *_DOCUMENTS, "KmsMasterKeyId"})
READABLE: Final = frozenset(
    {*_SETTABLE, *_COUNTS, "All", "CreatedTimestamp", "LastModifiedTimestamp", "QueueArn"}
)
_DEFAULT_RETENTION_S: Final = 345_600
_POLICY: Final = "sqs.Policy"
_TAG_KEYS: Final = "Tag keys must be between 1 and 128 characters in length."
_MAX_ACTIONS: Final = 7
_ACTIONS: Final = frozenset(
    {
        *("*", "ChangeMessageVisibility", "DeleteMessage", "GetQueueAttributes", "GetQueueUrl"),
        *("ListDeadLetterSourceQueues", "PurgeQueue", "ReceiveMessage", "SendMessage"),
    }
)


class QueueView(msgspec.Struct, frozen=True):
    """The settings of a queue that operations on messages need."""

    name: str
    fifo: bool
    visibility_s: int
    delay_s: int
    wait_s: int
    max_bytes: int
    content_dedup: bool
    group_dedup: bool
    created_at_ms: int


def view_of(spec: QueueSpec) -> QueueView:
    """Read those settings from a spec."""
    labels = spec.labels
    return QueueView(
        name=spec.name,
        fifo=spec.ordering is Ordering.FIFO,
        visibility_s=_number(labels, "VisibilityTimeout", -(-spec.lease_ms // 1000)),
        delay_s=-(-spec.delay_ms // 1000),
        wait_s=_number(labels, "ReceiveMessageWaitTimeSeconds", 0),
        max_bytes=_number(labels, "MaximumMessageSize", limits.SQS_MAX_MESSAGE_BYTES),
        content_dedup=labels.get("sqs.ContentBasedDeduplication") == "true",
        group_dedup=labels.get("sqs.DeduplicationScope") == "messageGroup",
        created_at_ms=spec.created_at_ms,
    )


def _number(labels: Mapping[str, str], name: str, otherwise: int) -> int:
    # Anybody may set labels: a value that could not have been set here does not count.
    number = _whole(labels.get(_LABEL + name, ""), *_NUMBERS[name])
    return otherwise if number is None else number


def _whole(text: str, low: int, high: int) -> int | None:
    """Return the number that a text is, if it is one within bounds."""
    good = text.isascii() and text.isdigit() and len(text) < 10 and low <= int(text) <= high
    return int(text) if good else None


# --- names ----------------------------------------------------------------------------------------


def check_name(name: str | None) -> str:
    """Check the name of a queue that is to be made."""
    if name is None:
        raise SqsFault.missing("QueueName")
    if not _NAME.fullmatch(name):
        raise SqsFault.invalid(
            "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length"
        )
    return name


def name_of_arn(arn: str) -> str | None:
    """Return the queue that an ARN names; None if it names none."""
    parts = arn.split(":")
    good = len(parts) == 6 and parts[0] == "arn" and parts[2] == "sqs" and parts[5]
    return parts[5] if good else None


# --- attributes in --------------------------------------------------------------------------------


def checked_attributes(attributes: Mapping[str, str], *, fifo: bool) -> dict[str, str]:
    """Check attributes that are to be set, and bring their values into one form."""
    checked: dict[str, str] = {}
    for given, text in attributes.items():
        name = given.strip()
        if name not in _SETTABLE:
            raise SqsFault.attribute_name(given)
        checked[name] = _checked_value(name, text)
    if checked.get("FifoQueue") == "true" and not fifo:
        raise SqsFault.invalid(
            "The name of a FIFO queue can only include alphanumeric characters, "
            "hyphens, or underscores, must end with .fifo suffix and be 1 to 80 in length."
        )
    if not fifo:
        for name in _FIFO_ONLY:
            if checked.get(name, "false") != "false":
                raise SqsFault.attribute_name(name)
    return checked


def _checked_value(name: str, text: str) -> str:
    if name in _NUMBERS:
        number = _whole(text, *_NUMBERS[name])
        if number is None:
            raise SqsFault.attribute_value(name)
        return str(number)
    if name in _CHOICES:
        lowered = text.lower()
        value = lowered if lowered in {"true", "false"} else text
        if value not in _CHOICES[name]:
            raise SqsFault.attribute_value(name)
        return value
    if name in _DOCUMENTS and text:
        return _checked_document(name, text)
    return text


class RedrivePolicy(msgspec.Struct, rename="camel"):
    """The attribute RedrivePolicy."""

    dead_letter_target_arn: str
    max_receive_count: Annotated[int, msgspec.Meta(ge=1, le=limits.SQS_MAX_RECEIVE_COUNT)]

    @property
    def dead_letter(self) -> str | None:
        """The queue that it names."""
        return name_of_arn(self.dead_letter_target_arn)


def _checked_document(name: str, text: str) -> str:
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise SqsFault.value(text, name, "not a JSON object.")
    if not document:
        return ""
    if name != "RedrivePolicy":
        return text
    try:
        policy = msgspec.convert(document, RedrivePolicy, strict=False)
    except msgspec.ValidationError as error:
        raise SqsFault.value(text, name, f"{error}.") from None
    if policy.dead_letter is None:
        raise SqsFault.value(text, name, "deadLetterTargetArn is not the ARN of a queue.")
    return _write_policy(policy.dead_letter_target_arn, policy.max_receive_count)


def _write_policy(target: str, count: int) -> str:
    # With the blanks that other servers put there: some callers compare the text.
    return json.dumps({"deadLetterTargetArn": target, "maxReceiveCount": count})


def redrive_policy_of(attributes: Mapping[str, str]) -> RedrivePolicy | None:
    """Return the RedrivePolicy among checked attributes; None if there is none."""
    text = attributes.get("RedrivePolicy")
    return msgspec.json.decode(text, type=RedrivePolicy) if text else None


def new_queue(done_retention_ms: int) -> dict[str, Any]:
    """Return the settings of a queue that was asked for without attributes.

    As in SQS, released and expired messages are visible at once, and none fails for good.
    """
    return {
        "lease_ms": 30_000,
        "max_attempts": limits.MAX_ATTEMPTS,
        "backoff_base_ms": 0,
        "backoff_cap_ms": 0,
        "unclaimed_retention_ms": _DEFAULT_RETENTION_S * 1000,
        "done_retention_ms": done_retention_ms,
    }


def settings_for(attributes: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, Any]:
    """Turn checked attributes into settings of a queue, with the labels it has so far."""
    settings: dict[str, Any] = {}
    replaced = {_LABEL + name for name in attributes}
    kept = {name: text for name, text in labels.items() if name not in replaced}
    for name, text in attributes.items():
        if name in _SETTINGS:
            settings[_SETTINGS[name]] = int(text) * 1000
        elif name == "RedrivePolicy":
            policy = redrive_policy_of(attributes)
            settings["max_attempts"] = policy.max_receive_count if policy else limits.MAX_ATTEMPTS
            settings["dead_letter"] = policy.dead_letter if policy else ""
        elif name != "FifoQueue" and text:
            kept[_LABEL + name] = text
    if settings.get("lease_ms") == 0:
        settings["lease_ms"] = 1000
        kept[f"{_LABEL}VisibilityTimeout"] = "0"
    settings["labels"] = kept
    return settings


# --- attributes out -------------------------------------------------------------------------------


def attributes_of(
    spec: QueueSpec, stats: QueueStats | None, arn: Callable[[str], str]
) -> dict[str, str]:
    """Return every attribute of a queue; without ``stats``, all but the counts."""
    labels = spec.labels
    made_s = str(spec.created_at_ms // 1000)
    view = view_of(spec)
    attributes = {
        "QueueArn": arn(spec.name),
        "CreatedTimestamp": made_s,
        "LastModifiedTimestamp": labels.get(CHANGED_LABEL, made_s),
        "VisibilityTimeout": str(view.visibility_s),
        "MaximumMessageSize": str(view.max_bytes),
        "MessageRetentionPeriod": str(-(-spec.unclaimed_retention_ms // 1000)),
        "DelaySeconds": str(view.delay_s),
        "ReceiveMessageWaitTimeSeconds": str(view.wait_s),
        "SqsManagedSseEnabled": labels.get("sqs.SqsManagedSseEnabled", "false"),
    }
    if stats is not None:
        attributes |= {name: str(getattr(stats, field)) for name, field in _COUNTS.items()}
    if view.fifo:
        attributes |= {
            "FifoQueue": "true",
            "ContentBasedDeduplication": "true" if view.content_dedup else "false",
            "DeduplicationScope": labels.get("sqs.DeduplicationScope", "queue"),
            "FifoThroughputLimit": labels.get("sqs.FifoThroughputLimit", "perQueue"),
        }
    if spec.dead_letter:
        target = arn(spec.dead_letter)
        attributes["RedrivePolicy"] = _write_policy(target, spec.max_attempts)
    for name in ("Policy", "RedriveAllowPolicy", "KmsMasterKeyId", "KmsDataKeyReusePeriodSeconds"):
        if _LABEL + name in labels:
            attributes[name] = labels[_LABEL + name]
    return attributes


# --- tags -----------------------------------------------------------------------------------------


def tags_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Return a queue's tags."""
    try:
        return msgspec.json.decode(labels.get(_TAGS, "{}"), type=dict[str, str])
    except msgspec.DecodeError:
        return {}


def with_tags(labels: dict[str, str], tags: Mapping[str, str], queue: str) -> dict[str, str]:
    """Return labels with these tags, all that a queue is to have, which are checked."""
    if len(tags) > limits.SQS_MAX_TAGS:
        raise SqsFault.invalid(f"Too many tags added for queue {queue}.")
    for key, value in tags.items():
        if not 1 <= len(key) <= 128:
            raise SqsFault.invalid(_TAG_KEYS)
        if len(value) > 256:
            raise SqsFault.invalid("Tag values must be at most 256 characters in length.")
    return _with_document(labels, _TAGS, tags)


def with_more_tags(labels: dict[str, str], request: SqsRequest, arn: str) -> dict[str, str]:
    """Add the tags of a request to those among a queue's labels."""
    if not request.tags:
        raise SqsFault.missing("Tags")
    return with_tags(labels, {**tags_of(labels), **request.tags}, arn.rpartition(":")[2])


def without_tags(labels: dict[str, str], request: SqsRequest, _: str) -> dict[str, str]:
    """Take the tags that a request names out of a queue's labels; missing ones are no error."""
    gone = request.tag_keys
    if not gone:
        raise SqsFault.invalid(_TAG_KEYS)
    left = {key: value for key, value in tags_of(labels).items() if key not in gone}
    return _with_document(labels, _TAGS, left)


def _with_document(
    labels: dict[str, str], label: str, document: Mapping[str, Any] | None
) -> dict[str, str]:
    """Return labels with a document as JSON; without it, if it is empty."""
    kept = {name: text for name, text in labels.items() if name != label}
    if document:
        kept[label] = msgspec.json.encode(document).decode()
    return kept


# --- policies: kept and given back; little of them is checked -------------------------------------


def with_permission(labels: dict[str, str], request: SqsRequest, arn: str) -> dict[str, str]:
    """Add a statement to the policy among a queue's labels."""
    label, accounts, actions = request.label, request.aws_account_ids, request.actions
    if not label:
        raise SqsFault.missing("Label")
    policy = _document(labels, "Policy") or {
        "Version": "2012-10-17",
        "Id": f"{arn}/SQSDefaultPolicy",
    }
    statements = _statements(policy)
    if any(each.get("Sid") == label for each in statements):
        raise SqsFault.value(label, "Label", "Already exists.")
    if not actions:
        raise SqsFault.missing("Actions")
    for action in actions:
        if action not in _ACTIONS:
            reason = "Only the queue owner is allowed to invoke this action."
            raise SqsFault.value(f"SQS:{action}", "ActionName", reason)
    if not accounts:
        raise SqsFault.value("[]", "PrincipalId", "Unable to verify.")
    if len(actions) > _MAX_ACTIONS:
        text = f"{len(actions)} Actions were found, maximum allowed is {_MAX_ACTIONS}."
        raise SqsFault("OverLimit", text, status=403)
    statement = {
        "Sid": label,
        "Effect": "Allow",
        "Principal": {"AWS": _one_or_all([f"arn:aws:iam::{each}:root" for each in accounts])},
        "Action": _one_or_all([f"SQS:{each}" for each in actions]),
        "Resource": arn,
    }
    return _with_document(labels, _POLICY, {**policy, "Statement": [*statements, statement]})


def without_permission(labels: dict[str, str], request: SqsRequest, _: str) -> dict[str, str]:
    """Take a statement out of the policy among a queue's labels."""
    label = request.label
    if not label:
        raise SqsFault.missing("Label")
    policy = _document(labels, "Policy")
    statements = _statements(policy)
    left = [each for each in statements if each.get("Sid") != label]
    if len(left) == len(statements):
        raise SqsFault.value(label, "Label", "can't find label on existing policy.")
    return _with_document(labels, _POLICY, {**policy, "Statement": left} if left else None)


def allows_source(labels: Mapping[str, str], source_arn: str) -> bool:
    """Whether a queue takes what fails in another, by its RedriveAllowPolicy."""
    policy = _document(labels, "RedriveAllowPolicy")
    permission = policy.get("redrivePermission", "allowAll")
    if permission == "byQueue":
        return source_arn in policy.get("sourceQueueArns", [])
    return bool(permission != "denyAll")


def _document(labels: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return the JSON object of an attribute; an empty one if there is none."""
    try:
        document = msgspec.json.decode(labels.get(_LABEL + name) or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _statements(policy: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = policy.get("Statement", [])
    found = found if isinstance(found, list) else [found]
    return [each for each in found if isinstance(each, dict)]


def _one_or_all(items: list[str]) -> str | list[str]:
    return items[0] if len(items) == 1 else items
