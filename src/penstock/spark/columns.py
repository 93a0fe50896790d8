"""Columns of the tables, as Spark sees them, and batches brought into exactly that shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from penstock.errors import InvalidInput
from penstock.flight.tables import schema_of

if TYPE_CHECKING:
    from penstock.spark.options import Options

__all__ = ["ROUTING", "Shape", "check_columns", "spark_schema"]

ROUTING: Final = {
    # A row is the name of a stage: the matches of a stretch, which the broker holds already.
    "matches": StructType([StructField("stage", StringType())]),
    "stretches": StructType(
        [
            StructField("log", IntegerType()),
            StructField("begin", LongType()),
            StructField("end", LongType()),
        ]
    ),
}


def spark_schema(options: Options) -> StructType:
    """Return the schema of a table, with the payload and the columns that were asked for."""
    if options.table in ROUTING:
        return ROUTING[options.table]
    columns = None if options.columns is None else list(options.columns)
    return from_arrow_schema(schema_of(options.table, payload=options.payload, columns=columns))


def check_columns(given: StructType, actual: StructType, table: str) -> None:
    """Compare a schema that the user gave with the table's; name every column that differs."""
    wrong = [
        f"{field.name} is {actual[field.name].dataType.simpleString()}, "
        f"not {field.dataType.simpleString()}"
        if field.name in actual.names
        else f"{field.name} is not there"
        for field in given.fields
        if field.name not in actual.names or actual[field.name].dataType != field.dataType
    ]
    if wrong:
        raise InvalidInput(f"the schema does not fit table {table!r}: {'; '.join(wrong)}")


class Shape:
    """The exact Arrow schema that Spark expects of a reader; picklable."""

    def __init__(self, schema: StructType) -> None:
        self.names = schema.names
        self._arrow = to_arrow_schema(schema, timezone="UTC")

    def fit(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the batch with these columns, in this order, of these types."""
        if batch.schema.equals(self._arrow):
            return batch
        columns = [batch.column(field.name).cast(field.type) for field in self._arrow]
        return pa.RecordBatch.from_arrays(columns, schema=self._arrow)
