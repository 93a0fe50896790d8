"""Files of a directory or of an S3 bucket, by name: where backups are, and where SlateDB's are.

A file is there whole or not at all. Access to S3 is pyarrow's, with the variables that SlateDB
reads (``AWS_ENDPOINT_URL``, ``AWS_REGION``, ``AWS_ACCESS_KEY_ID``, ...).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from penstock.clock import SystemClock
from penstock.engines.disk import sync_path
from penstock.errors import InvalidInput, InvalidUrl, StorageFailed, needs_extra

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import BinaryIO

_CHUNK: Final = 4 << 20
BUCKET_NAME: Final = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
_BUCKET: Final = re.compile(rf"s3://({BUCKET_NAME})((?:/[^/\s]+)*)/?")
_TRUE: Final = {"true", "1", "yes", "on"}
# Of a file that is being written; nobody lists it.
_PART: Final = ".part-"


def place_at(text: str) -> Place:
    """Return the place of a path, or of ``s3://BUCKET/PREFIX``."""
    if not text.startswith("s3:"):
        if "://" in text or not text:
            raise InvalidInput(f"a place is a directory or s3://BUCKET/PREFIX, not {text!r:.200}")
        return Directory(Path(text))
    found = _BUCKET.fullmatch(text)
    if found is None:
        raise InvalidInput(f"a place on S3 is s3://BUCKET/PREFIX, not {text!r:.200}")
    return Bucket(found[1], found[2].strip("/"))


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"{what}: {error}") from error


class Directory:
    """The files below a directory, which is made when the first is written.

    Folders of a name are parted by slashes.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the sizes of all files below a folder, by name; none if it is not there."""
        found = {}
        with _told(f"can't list {self.root}"):
            for path in (self.root / folder).rglob("*"):
                # Somebody may remove it meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    if path.is_file() and _PART not in path.name:
                        found[path.relative_to(self.root).as_posix()] = path.stat().st_size
        return found

    def read(self, name: str) -> Iterator[bytes]:
        """Give the bytes of a file, in pieces."""
        with _told(f"can't read {self.root / name}"), (self.root / name).open("rb") as file:
            while piece := file.read(_CHUNK):
                yield piece

    def write(self, name: str, source: BinaryIO) -> None:
        """Write a file, which is on stable storage then; one of that name is replaced."""
        path = self.root / name
        part = path.with_name(f"{path.name}{_PART}{SystemClock().lease_id().hex()}")
        with _told(f"can't write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with part.open("wb") as file:
                    shutil.copyfileobj(source, file, _CHUNK)
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            sync_path(path.parent)

    def delete(self, name: str) -> None:
        """Remove a file; one that is not there is no error."""
        with _told(f"can't remove {self.root / name}"):
            (self.root / name).unlink(missing_ok=True)


class Bucket:
    """The same verbs on the objects of an S3 bucket below a prefix."""

    def __init__(self, bucket: str, prefix: str) -> None:
        with needs_extra("flight", "a place on S3"):
            from pyarrow import fs  # noqa: PLC0415 - an extra
        self._fs = fs
        self._root = f"{bucket}/{prefix}".rstrip("/")
        with _told(str(self)):
            self._files = fs.S3FileSystem(**_access(os.environ))

    def __str__(self) -> str:
        return f"s3://{self._root}"

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the sizes of all files below a folder, by name; none if it is not there."""
        base = f"{self._root}/{folder}".rstrip("/")
        selector = self._fs.FileSelector(base, allow_not_found=True, recursive=True)
        with _told(f"can't list {self}"):
            found = self._files.get_file_info(selector)
        names = (each for each in found if each.type == self._fs.FileType.File)
        return {each.path.removeprefix(f"{self._root}/"): each.size for each in names}

    def read(self, name: str) -> Iterator[bytes]:
        """Give the bytes of a file, in pieces."""
        with _told(f"can't read {self}/{name}"):
            file = self._files.open_input_stream(f"{self._root}/{name}", compression=None)
            with contextlib.closing(file):
                while piece := file.read(_CHUNK):
                    yield piece

    def write(self, name: str, source: BinaryIO) -> None:
        """Write a file, which is on stable storage then; one of that name is replaced."""
        path = f"{self._root}/{name}"
        with _told(f"can't write {self}/{name}"):
            stream: Any = self._files.open_output_stream(path, compression=None)
            try:
                shutil.copyfileobj(source, stream, _CHUNK)
            except BaseException:
                # There is no way to end it without an object: what has come is written, and goes.
                with contextlib.suppress(OSError):
                    stream.close()
                    self._files.delete_file(path)
                raise
            stream.close()

    def delete(self, name: str) -> None:
        """Remove a file; one that is not there is no error."""
        with _told(f"can't remove {self}/{name}"), contextlib.suppress(FileNotFoundError):
            self._files.delete_file(f"{self._root}/{name}")


Place: TypeAlias = Directory | Bucket


def endpoint_of(environment: Mapping[str, str]) -> str:
    """Return the endpoint of S3, empty for Amazon's; refuse one without TLS that is not allowed."""
    endpoint = environment.get("AWS_ENDPOINT_URL", "")
    allowed = environment.get("AWS_ALLOW_HTTP", "").lower() in _TRUE
    if endpoint.startswith("http://") and not allowed:
        raise InvalidUrl(
            f"AWS_ENDPOINT_URL is {endpoint!r:.200}: set AWS_ALLOW_HTTP=true to send credentials "
            "and messages without TLS"
        )
    return endpoint


def _access(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return pyarrow's parameters; credentials it finds itself."""
    endpoint = endpoint_of(environment)
    access: dict[str, Any] = {"background_writes": False}
    if endpoint:
        scheme, _, host = endpoint.partition("://")
        access |= {"endpoint_override": host.rstrip("/"), "scheme": scheme}
    if region := environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION"):
        access["region"] = region
    return access
