"""Damage to the files of a RocksDB store, for tests: which file holds what, and bytes flipped."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.engines.rocksdb import RocksEngine

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from penstock.engines import Shape

__all__ = ["compact", "files_of", "flip"]


def compact(store: Path, tables: Mapping[str, Shape]) -> None:
    """Have everything in one level of files, and nothing in the log."""
    engine = RocksEngine(store, tables)
    for name in tables:
        column = engine.table(name).column
        column.flush()
        column.compact_range(None, None)
    del column
    engine.close()


def files_of(store: Path) -> dict[str, list[Path]]:
    """Return the files of rows of a store by table, in the order of their numbers."""
    found: dict[str, list[Path]] = {}
    for file in sorted(store.glob("*.sst")):
        found.setdefault(_table_of(file), []).append(file)
    return found


def _table_of(file: Path) -> str:
    # Among its properties a file has the name of its column family. Its key is cut to what differs
    # from the key before: 22 bytes shared, 4 of its own, the length of the value.
    match = re.search(rb"\x16\x04(.)name", contents := file.read_bytes(), re.DOTALL)
    assert match is not None, f"{file} names no column family"
    return contents[match.end() : match.end() + match[1][0]].decode()


def flip(file: Path, at: int, count: int = 1) -> None:
    """Flip bits of ``count`` bytes of a file."""
    contents = bytearray(file.read_bytes())
    for place in range(at, min(at + count, len(contents))):
        contents[place] ^= 0x5A
    file.write_bytes(contents)
