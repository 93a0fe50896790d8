"""A store as tables of Arrow record batches.

``schemas`` says what the tables look like, ``partitions`` cuts them into parts that can be read
side by side, ``reading`` turns a part of a pinned store into record batches, ``columns`` makes
the columns. ``wire`` has the commands by which servers and clients speak of them. Needs pyarrow:
nothing below the server imports this package.
"""

from __future__ import annotations

from penstock.flight.partitions import Part, partition
from penstock.flight.schemas import TABLES, Selection, schema_of, select
from penstock.flight.tables import read

__all__ = ["TABLES", "Part", "Selection", "partition", "read", "schema_of", "select"]
