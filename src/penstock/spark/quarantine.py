"""Bad rows of a write, kept in a directory of Parquet files with the reasons."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from penstock.clock import SystemClock
from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping


class Quarantine:
    """The file of one task, which is made when the first row comes.

    It has its name when it is whole. A task that is tried again replaces it.
    """

    def __init__(self, directory: str, name: str) -> None:
        self._files, place = _located(directory)
        self._path = f"{place}/{name}.parquet"
        # Readers of directories leave names out that begin so.
        self._unfinished = f"{place}/_{name}-{SystemClock().lease_id().hex()}"
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._writer is None:
            return
        self._writer.close()
        if kind is None:
            self._files.move(self._unfinished, self._path)
        else:
            with contextlib.suppress(OSError):
                self._files.delete_file(self._unfinished)

    def add(self, batch: pa.RecordBatch, bad: Mapping[int, str]) -> None:
        """Write rows of a batch, by their numbers, with the reasons."""
        rows = batch.take(pa.array(bad, pa.int64()))
        rows = rows.append_column("reason", pa.array(bad.values(), pa.string()))
        if self._writer is None:
            self._files.create_dir(self._path.rpartition("/")[0], recursive=True)
            self._writer = pq.ParquetWriter(self._unfinished, rows.schema, filesystem=self._files)
        self._writer.write_batch(rows)


def _located(directory: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return the file system of a directory, and the path there."""
    try:
        files, path = pyarrow.fs.FileSystem.from_uri(directory)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InvalidInput(f"quarantinePath {directory!r:.200} can't be used: {error}") from None
    return files, path.rstrip("/")
