"""Where a SlateDB database is: a directory, or a prefix in an S3 bucket.

Endpoint, region and credentials of S3 come from the usual variables of the environment
(``AWS_ENDPOINT_URL``, ``AWS_REGION``, ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``,
``AWS_SESSION_TOKEN``, ``AWS_ALLOW_HTTP``, roles), which the library reads itself.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, NoReturn
from urllib.parse import unquote

from slatedb.uniffi import CloseReason, Error, ObjectStore, ObjectStoreBuilder, ObjectStoreType

from penstock.errors import InvalidUrl, StorageFailed, StoreDamaged, StoreFenced

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NO_DATABASE", "Place", "WalFiles", "place_of", "translate", "translate_open"]

# What the library says of a place that holds no database yet.
NO_DATABASE: Final = "failed to find latest transactional object"
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
# SlateDB's own folders: a directory without any of them holds something else.
_FOLDERS: Final = frozenset({"manifest", "wal", "compacted", "compactions", "gc"})
_TRUE: Final = {"true", "1", "yes", "on"}


class Place(NamedTuple):
    """A directory, or a bucket with a prefix."""

    kind: Literal["file", "s3"]
    root: str
    path: str

    def __str__(self) -> str:
        if self.kind == "file":
            return f"slatedb+file://{self.root}"
        return f"slatedb+s3://{self.root}/{self.path}"

    def store(self) -> ObjectStore:
        """Return the library's handle; the directory is made if it is not there."""
        if self.kind == "file":
            try:
                Path(self.root).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageFailed(f"can't make the directory {self.root}: {error}") from error
            builder = ObjectStoreBuilder.from_env(ObjectStoreType.LOCAL)
            builder.with_config("local_path", self.root)
        else:
            builder = ObjectStoreBuilder.from_env(ObjectStoreType.S3)
            builder.with_config("bucket", self.root)
        try:
            return builder.build()
        except Error as error:
            raise InvalidUrl(f"{self}: {_words(error)}") from error

    def holds_something_else(self) -> bool:
        """Whether this is a directory of other files; of a bucket that can't be told."""
        root = Path(self.root)
        if self.kind == "s3" or not root.exists():
            return False
        if not root.is_dir():
            return True
        names = {each.name for each in root.iterdir()}
        return bool(names) and not names & _FOLDERS


def place_of(scheme: str, rest: str, environment: Mapping[str, str]) -> Place:
    """Read what stands behind the colon of a ``slatedb+file:`` or ``slatedb+s3:`` URL."""
    authority, _, path = rest[2:].partition("/")
    if scheme == "slatedb+file":
        root = "/" + unquote(path).strip("/")
        if not rest.startswith("///") or root == "/" or {".", ".."} & set(root.split("/")):
            named = unquote(rest).lstrip("/")
            hint = f"slatedb+file://{Path(named).resolve()}" if named else "slatedb+file:///DIR"
            raise InvalidUrl(
                f"slatedb+file:{rest:.200} names no absolute directory: {hint:.300} would be one"
            )
        return Place("file", root, "")
    bucket, prefix = authority, unquote(path).strip("/")
    if not rest.startswith("//") or not _BUCKET.fullmatch(bucket):
        raise InvalidUrl(
            f"slatedb+s3://BUCKET/PREFIX needs the name of a bucket, got {bucket!r:.100}"
        )
    if any(part in {"", ".", ".."} for part in prefix.split("/")) and prefix:
        raise InvalidUrl(f"the prefix {prefix!r:.200} has an empty part, or one of dots")
    endpoint = environment.get("AWS_ENDPOINT_URL", "")
    allowed = environment.get("AWS_ALLOW_HTTP", "").lower() in _TRUE
    if endpoint.startswith("http://") and not allowed:
        raise InvalidUrl(
            f"AWS_ENDPOINT_URL is {endpoint!r:.200}: set AWS_ALLOW_HTTP=true to send credentials "
            "and messages without TLS"
        )
    return Place("s3", bucket, prefix)


# --- errors ---------------------------------------------------------------------------------------


def _words(error: BaseException) -> str:
    return str(getattr(error, "message", error))


def is_fenced(error: BaseException) -> bool:
    """Whether the library says that another writer has taken over."""
    return isinstance(error, Error.Closed) and error.reason is CloseReason.FENCED


def fenced(place: Place) -> StoreFenced:
    """Make the error of a broker whose store was taken over."""
    return StoreFenced(
        f"another broker has opened {place} and owns it now; this one can do no more: close it"
    )


def translate(error: BaseException, place: Place) -> NoReturn:
    """Turn the library's errors into ours."""
    if is_fenced(error):
        raise fenced(place) from error
    if isinstance(error, Error.Data):
        raise StoreDamaged(
            f"{place} can't be read: {_words(error)}. Restore a copy of its objects, or save the "
            "rest with 'penstock salvage'"
        ) from error
    raise StorageFailed(f"{place}: SlateDB failed: {_words(error)}") from error


def translate_open(error: BaseException, place: Place) -> NoReturn:
    """Say what stands in the way of opening."""
    words = _words(error)
    if "NoSuchBucket" in words:
        raise InvalidUrl(f"{place}: there is no bucket {place.root}") from error
    if "403 Forbidden" in words or "401 Unauthorized" in words:
        reason = re.search(r"<Code>(\w+)</Code>", words)
        raise StorageFailed(
            f"{place}: the object store refuses these credentials"
            f" ({reason.group(1) if reason else 'forbidden'}): see AWS_ACCESS_KEY_ID,"
            " AWS_SECRET_ACCESS_KEY and AWS_REGION"
        ) from error
    if isinstance(error, Error.Unavailable):
        raise StorageFailed(f"{place}: the object store does not answer: {words}") from error
    translate(error, place)


# --- fsync of a directory -------------------------------------------------------------------------


class WalFiles:
    """Fsyncs the files of the write-ahead log of a database in a directory.

    The library leaves that to the operating system. Files are numbered without gaps.
    """

    def __init__(self, root: str) -> None:
        self._folder = Path(root) / "wal"
        self._folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(each.stem) for each in self._folder.glob("*.sst") if each.stem.isdigit()]
        self._next = max(numbers, default=0) + 1

    def sync(self) -> None:
        """Fsync every file that has come since the last call."""
        come = False
        while self._sync_one(self._folder / f"{self._next:020}.sst"):
            self._next += 1
            come = True
        if come:
            self._sync_one(self._folder)

    @staticmethod
    def _sync_one(path: Path) -> bool:
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        return True
