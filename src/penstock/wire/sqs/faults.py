"""The errors of SQS: code in the JSON protocol, code in the query protocol, message, status."""

from __future__ import annotations

from typing import Final

_PREFIX: Final = "AWS.SimpleQueueService."

# Errors that the query protocol names otherwise: most with a prefix.
QUERY_CODES: Final = {
    **{
        name: f"{_PREFIX}{name}"
        for name in (
            *("BatchEntryIdsNotDistinct", "BatchRequestTooLong", "EmptyBatchRequest"),
            *("InvalidBatchEntryId", "MessageNotInflight", "PurgeQueueInProgress"),
            *("QueueDeletedRecently", "TooManyEntriesInBatchRequest", "UnsupportedOperation"),
        )
    },
    "QueueDoesNotExist": f"{_PREFIX}NonExistentQueue",
    "QueueNameExists": "QueueAlreadyExists",
    "InvalidParameterValueException": "InvalidParameterValue",
    "MissingRequiredParameterException": "MissingParameter",
    "AccessDeniedException": "AccessDenied",
    "UnknownOperationException": "InvalidAction",
    "SerializationException": "MalformedInput",
    "MissingAuthenticationTokenException": "MissingAuthenticationToken",
    "IncompleteSignatureException": "IncompleteSignature",
    "InvalidSignatureException": "SignatureDoesNotMatch",
    "UnrecognizedClientException": "InvalidClientTokenId",
}


class SqsFault(Exception):
    """A request that SQS would refuse, as it would refuse it."""

    def __init__(self, code: str, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status

    @property
    def query_code(self) -> str:
        """The code that the query protocol has for it."""
        return QUERY_CODES.get(self.code, self.code)

    @property
    def sender(self) -> bool:
        """Whether the request is to blame, and not the server."""
        return self.status < 500

    @classmethod
    def no_queue(cls) -> SqsFault:
        """Say that the queue is not there."""
        return cls("QueueDoesNotExist", "The specified queue does not exist.")

    @classmethod
    def invalid(cls, message: str) -> SqsFault:
        """Say that a parameter's value is not allowed."""
        return cls("InvalidParameterValueException", message)

    @classmethod
    def value(cls, value: object, parameter: str, reason: str) -> SqsFault:
        """Say which value of a parameter is not allowed, and why."""
        shown = str(value)
        shown = shown if len(shown) <= 200 else shown[:197] + "..."
        return cls.invalid(f"Value {shown} for parameter {parameter} is invalid. Reason: {reason}")

    @classmethod
    def missing(cls, parameter: str) -> SqsFault:
        """Say that a parameter was left out."""
        return cls(
            "MissingRequiredParameterException",
            f"The request must contain the parameter {parameter}.",
        )

    @classmethod
    def bad_receipt(cls) -> SqsFault:
        """Say that a receipt handle is none of this queue."""
        return cls("ReceiptHandleIsInvalid", "The input receipt handle is invalid.")

    @classmethod
    def attribute_name(cls, name: str) -> SqsFault:
        """Say that queues have no such attribute."""
        return cls("InvalidAttributeName", f"Unknown Attribute {name[:200]}.")

    @classmethod
    def attribute_value(cls, name: str) -> SqsFault:
        """Say that a queue's attribute can't have that value."""
        return cls("InvalidAttributeValue", f"Invalid value for the parameter {name}.")
