"""The sink of the route job: executors have staged, the driver commits.

::

    executor   matches ──stage──▶ held by the broker, seen by nobody
    driver     commit_stages ──▶ into the queues, and the cursor past them: one change of the store

A stage that is never committed is dropped by the broker after a while. Nothing here deletes what
a commit may have published: an abort only drops what is still staged.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from penstock.errors import InvalidInput, PenstockError
from penstock.model import AssignStatus
from penstock.spark.broker_client import fenced, store
from penstock.spark.columns import ROUTING, check_columns
from penstock.spark.matching import settle_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from penstock.spark.options import Options

__all__ = ["AssignmentWriter", "Staged", "commit"]

logger = logging.getLogger(__name__)


class Staged(WriterCommitMessage):
    """The stages that one task has handed on."""

    def __init__(self, stages: list[str]) -> None:
        self.stages = stages


def commit(location: str, stages: Sequence[str], epoch: int | None) -> int:
    """Commit stages; return how many assignments were placed.

    Stages that did not take are left to the next micro-batch, which begins at the cursor; that
    another pipeline has taken over is an error.
    """
    if not stages:
        return 0
    client = store(location)
    try:
        results = client.commit_stages(list(stages), epoch=epoch)
    except InvalidInput as error:
        if "is not here" not in str(error):
            raise
        logger.warning("routed again in the next micro-batch: %s", error)
        return 0
    for result in results:
        if result.status == AssignStatus.FENCED:
            raise fenced(epoch, client.route_plan(max_offsets=1).epoch)
        if result.status in {AssignStatus.OUTDATED, AssignStatus.AHEAD}:
            logger.warning(
                "log %d is routed again from offset %d: the micro-batch was %s",
                result.log,
                result.cursor,
                result.status,
            )
            # The broker keeps what is not committed for an hour; what is, only for a few more.
            with contextlib.suppress(PenstockError):
                client.drop_stages(list(stages))
    return sum(result.placed for result in results)


class AssignmentWriter(DataSourceStreamArrowWriter):
    """Gathers the stages of all tasks, and commits them all at once."""

    def __init__(self, options: Options, schema: StructType) -> None:
        check_columns(schema, ROUTING["matches"], "assignments")
        self._location = options.location
        self._epoch = options.epoch

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Hand on what one task has staged."""
        settle_in()
        return Staged([stage for batch in iterator for stage in batch.column("stage").to_pylist()])

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        """Hand the whole micro-batch over; Spark may call this again for the same one."""
        settle_in()
        commit(self._location, _stages(messages), self._epoch)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        """Drop what is still staged. What a commit may have published stays."""
        with contextlib.suppress(PenstockError):
            store(self._location).drop_stages(_stages(messages))


def _stages(messages: list[WriterCommitMessage | None]) -> list[str]:
    return [stage for one in messages if isinstance(one, Staged) for stage in one.stages]
