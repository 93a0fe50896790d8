"""Arrow Flight: a store as tables of record batches, served and read.

``protocol`` has the commands and actions that server and client share, ``tables`` the schemas and
the reading of tables, ``snapshots`` cuts a pinned store into parts, ``writes`` takes rows that
clients send; ``service`` answers, ``listener`` runs it, ``client`` calls it. Needs pyarrow: nothing
below the server imports this package.
"""

from __future__ import annotations

from penstock.errors import needs_extra

with needs_extra("flight", "Arrow Flight"):
    from penstock.flight.snapshots import Part, partition
    from penstock.flight.tables import TABLES, Selection, read, schema_of, select

__all__ = ["TABLES", "Part", "Selection", "partition", "read", "schema_of", "select"]
