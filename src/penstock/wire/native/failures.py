"""Errors across the wire: by the name of their class, and back as the same class."""

from __future__ import annotations

from typing import Final

from penstock import errors
from penstock.errors import InvalidFilter, PenstockError
from penstock.wire.native.messages import Failure, Place

__all__ = ["error_of", "failure_of"]

_CLASSES: Final[dict[str, type[PenstockError]]] = {
    name: getattr(errors, name) for name in errors.__all__
}


def failure_of(request_id: int, error: BaseException) -> Failure:
    """Make the answer to a request that failed; of a stranger's error only the kind is told."""
    if not isinstance(error, PenstockError):
        name = type(error).__name__
        return Failure(request_id, "PenstockError", f"the server failed ({name}); its log says why")
    place = None
    if isinstance(error, InvalidFilter):
        place = Place(error.line, error.column, error.fragment)
    # The nearest class of the tree, if it is one that a client can't know.
    known = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _CLASSES)
    return Failure(request_id, known, str(error), place)


def error_of(name: str, message: str, place: Place | None = None) -> PenstockError:
    """Make the error that the other side had; one of a class that is not known is the base's."""
    kind = _CLASSES.get(name, PenstockError)
    if kind is InvalidFilter and place is not None:
        return InvalidFilter(message, line=place.line, column=place.column, fragment=place.fragment)
    return kind(message)
