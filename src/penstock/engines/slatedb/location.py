"""The location of a SlateDB database, a directory or an S3 bucket; and the library's errors.

Endpoint, region and credentials of S3 come from the usual variables of the environment
(``AWS_ENDPOINT_URL``, ``AWS_REGION``, ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``,
``AWS_SESSION_TOKEN``, ``AWS_ALLOW_HTTP``, roles), which the library reads itself.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, NoReturn
from urllib.parse import unquote

from slatedb.uniffi import CloseReason, Error, ObjectStore, ObjectStoreBuilder, ObjectStoreType

from penstock.errors import InvalidUrl, StorageFailed, StoreDamaged, StoreFenced

if TYPE_CHECKING:
    from collections.abc import Mapping

# Words of the library for a location that holds no database yet.
NO_DATABASE: Final = "failed to find latest transactional object"
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
# SlateDB's own folders: a directory without any of them holds something else.
_FOLDERS: Final = frozenset({"manifest", "wal", "compacted", "compactions", "gc"})
_TRUE: Final = {"true", "1", "yes", "on"}


class SlateLocation(NamedTuple):
    """A directory, or a bucket with a prefix."""

    kind: Literal["file", "s3"]
    root: str
    path: str

    def __str__(self) -> str:
        if self.kind == "file":
            return f"slatedb+file://{self.root}"
        return f"slatedb+s3://{self.root}/{self.path}"

    def store(self) -> ObjectStore:
        """Return the library's handle; make the directory if it is not there."""
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
        names = {each.name for each in root.iterdir()} if root.is_dir() else {""}
        return bool(names) and not names & _FOLDERS


def parse_location(scheme: str, rest: str, environment: Mapping[str, str]) -> SlateLocation:
    """Read the part behind the colon of a ``slatedb+file:`` or ``slatedb+s3:`` URL."""
    authority, _, path = rest[2:].partition("/")
    if scheme == "slatedb+file":
        root = "/" + unquote(path).strip("/")
        if not rest.startswith("///") or root == "/" or {".", ".."} & set(root.split("/")):
            named = unquote(rest).lstrip("/")
            hint = f"slatedb+file://{Path(named).resolve()}" if named else "slatedb+file:///DIR"
            raise InvalidUrl(
                f"slatedb+file:{rest:.200} names no absolute directory: {hint:.300} would be one"
            )
        return SlateLocation("file", root, "")
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
    return SlateLocation("s3", bucket, prefix)


# --- errors ---------------------------------------------------------------------------------------


def _words(error: BaseException) -> str:
    return str(getattr(error, "message", error))


def fenced(location: SlateLocation) -> StoreFenced:
    """Make the error of a broker whose store another broker has taken over."""
    return StoreFenced(
        f"another broker has opened {location} and owns it now; this one can do no more: close it"
    )


def translate(error: BaseException, location: SlateLocation) -> NoReturn:
    """Raise our error for the library's."""
    if isinstance(error, Error.Closed) and error.reason is CloseReason.FENCED:
        raise fenced(location) from error
    if isinstance(error, Error.Data):
        raise StoreDamaged(
            f"{location} can't be read: {_words(error)}. Restore a copy of its objects, or save "
            "the rest with 'penstock salvage'"
        ) from error
    raise StorageFailed(f"{location}: SlateDB failed: {_words(error)}") from error


def translate_open(error: BaseException, location: SlateLocation) -> NoReturn:
    """Raise our error for the library's when it could not open a database."""
    words = _words(error)
    if "NoSuchBucket" in words:
        raise InvalidUrl(f"{location}: there is no bucket {location.root}") from error
    if "403 Forbidden" in words or "401 Unauthorized" in words:
        reason = re.search(r"<Code>(\w+)</Code>", words)
        raise StorageFailed(
            f"{location}: the object store refuses these credentials"
            f" ({reason.group(1) if reason else 'forbidden'}): see AWS_ACCESS_KEY_ID,"
            " AWS_SECRET_ACCESS_KEY and AWS_REGION"
        ) from error
    if isinstance(error, Error.Unavailable):
        raise StorageFailed(f"{location}: the object store does not answer: {words}") from error
    translate(error, location)
