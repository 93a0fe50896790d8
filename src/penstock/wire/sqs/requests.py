"""The requests of the 23 operations. Every field may be missing: operations check for theirs.

Field names are those of the API model in Python's spelling; the wire's spelling is made from them.
"""

from __future__ import annotations

from typing import Final

import msgspec


class SqsRequest(msgspec.Struct, rename="pascal", kw_only=True):
    """Any request."""


class OnQueue(SqsRequest):
    """A request about one queue."""

    queue_url: str | None = None


class AttributeValue(msgspec.Struct, rename="pascal", gc=False, omit_defaults=True):
    """The value of a message attribute."""

    data_type: str | None = None
    string_value: str | None = None
    binary_value: bytes | None = None


class SendEntry(msgspec.Struct, rename="pascal", kw_only=True):
    """A message to send: the fields that one message and an entry of a batch share."""

    id: str | None = None
    message_body: str | None = None
    delay_seconds: int | None = None
    message_attributes: dict[str, AttributeValue] | None = None
    message_system_attributes: dict[str, AttributeValue] | None = None
    message_deduplication_id: str | None = None
    message_group_id: str | None = None


class DeleteEntry(msgspec.Struct, rename="pascal", kw_only=True):
    """A message to delete."""

    id: str | None = None
    receipt_handle: str | None = None


class VisibilityEntry(msgspec.Struct, rename="pascal", kw_only=True):
    """A message whose visibility timeout changes."""

    id: str | None = None
    receipt_handle: str | None = None
    visibility_timeout: int | None = None


class AddPermission(OnQueue):
    """Let accounts do things: kept in the queue's policy."""

    label: str | None = None
    aws_account_ids: list[str] | None = msgspec.field(default=None, name="AWSAccountIds")
    actions: list[str] | None = None


class CancelMessageMoveTask(SqsRequest):
    """Stop a move."""

    task_handle: str | None = None


class ChangeMessageVisibility(OnQueue):
    """Change when a message that is held becomes visible again."""

    receipt_handle: str | None = None
    visibility_timeout: int | None = None


class ChangeMessageVisibilityBatch(OnQueue):
    """Do it to several."""

    entries: list[VisibilityEntry] | None = None


class CreateQueue(SqsRequest):
    """Make a queue."""

    queue_name: str | None = None
    attributes: dict[str, str] | None = None
    tags: dict[str, str] | None = msgspec.field(default=None, name="tags")


class DeleteMessage(OnQueue):
    """Settle a message as done."""

    receipt_handle: str | None = None


class DeleteMessageBatch(OnQueue):
    """Settle several."""

    entries: list[DeleteEntry] | None = None


class DeleteQueue(OnQueue):
    """Remove a queue with its messages."""


class GetQueueAttributes(OnQueue):
    """Ask for settings and depth."""

    attribute_names: list[str] | None = None


class GetQueueUrl(SqsRequest):
    """Find a queue by its name."""

    queue_name: str | None = None
    queue_owner_aws_account_id: str | None = msgspec.field(
        default=None, name="QueueOwnerAWSAccountId"
    )


class ListDeadLetterSourceQueues(OnQueue):
    """Ask which queues send what fails to this one."""

    next_token: str | None = None
    max_results: int | None = None


class ListMessageMoveTasks(SqsRequest):
    """Ask for the moves out of a queue."""

    source_arn: str | None = None
    max_results: int | None = None


class ListQueueTags(OnQueue):
    """Ask for a queue's tags."""


class ListQueues(SqsRequest):
    """Ask for queues by the beginning of their name."""

    queue_name_prefix: str | None = None
    next_token: str | None = None
    max_results: int | None = None


class PurgeQueue(OnQueue):
    """Remove all messages of a queue."""


class ReceiveMessage(OnQueue):
    """Take messages."""

    attribute_names: list[str] | None = None
    message_system_attribute_names: list[str] | None = None
    message_attribute_names: list[str] | None = None
    max_number_of_messages: int | None = None
    visibility_timeout: int | None = None
    wait_time_seconds: int | None = None
    receive_request_attempt_id: str | None = None


class RemovePermission(OnQueue):
    """Take a permission out of the queue's policy."""

    label: str | None = None


class SendMessage(OnQueue):
    """Publish a message; with the fields of :class:`SendEntry`."""

    id: str | None = None
    message_body: str | None = None
    delay_seconds: int | None = None
    message_attributes: dict[str, AttributeValue] | None = None
    message_system_attributes: dict[str, AttributeValue] | None = None
    message_deduplication_id: str | None = None
    message_group_id: str | None = None


class SendMessageBatch(OnQueue):
    """Publish several."""

    entries: list[SendEntry] | None = None


class SetQueueAttributes(OnQueue):
    """Change settings of a queue."""

    attributes: dict[str, str] | None = None


class StartMessageMoveTask(SqsRequest):
    """Move the messages of a dead letter queue elsewhere, or back to their queues."""

    source_arn: str | None = None
    destination_arn: str | None = None
    max_number_of_messages_per_second: int | None = None


class TagQueue(OnQueue):
    """Add tags."""

    tags: dict[str, str] | None = None


class UntagQueue(OnQueue):
    """Remove tags."""

    tag_keys: list[str] | None = None


OPERATIONS: Final[dict[str, type[SqsRequest]]] = {
    kind.__name__: kind
    for kind in (*SqsRequest.__subclasses__(), *OnQueue.__subclasses__())
    if kind is not OnQueue
}
