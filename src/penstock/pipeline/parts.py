"""The parts of a pipeline, over one session of Spark.

Routing is a query that goes on until it is stopped. The others are jobs that end; each has a pool
of Spark's fair scheduler, so that a long one leaves routing its share of the cores.
"""

from __future__ import annotations

import logging
import shutil
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.clock import SystemClock
from penstock.errors import PenstockError, StorageFailed
from penstock.flight.client import FlightStore
from penstock.pipeline.file import located, steps_of, text_of
from penstock.pipeline.supervisor import Part, Schedule, Superseded
from penstock.spark import jobs, sessions
from penstock.spark.pipelines import pipeline as own_pipeline
from penstock.spark.route import fenced, is_fenced, route

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.pipeline.file import Report, Settings

log = logging.getLogger("penstock.pipeline")

_CONF: Final = {
    # Spark's own lines, with the stacks of two languages, beside the one line that a part has.
    "spark.log.level": "OFF",
    "spark.ui.enabled": "false",
    "spark.scheduler.mode": "FAIR",
}
_LOOK_SECONDS: Final = 1
# The name of a report's directory; what has another name is not removed.
_REPORT: Final = "report-%Y%m%dT%H%M%SZ"


def start_spark(settings: Settings) -> SparkSession:
    """Start the session of a pipeline; call it from a thread that takes no signals."""
    master, conf = settings.spark.master or None, settings.spark.conf
    given = {key: text_of(value) for key, value in conf.items()}
    return sessions.session(
        master, name="penstock-pipeline", quick=settings.spark.quick, conf={**_CONF, **given}
    )


class Work:
    """Everything that the parts of a file do, with one session."""

    def __init__(self, path: Path, settings: Settings, spark: SparkSession) -> None:
        self._settings = settings
        self._spark = spark
        self._location = located(settings)
        self._steps = steps_of(path, settings)
        if self._steps is not None:
            # Executors have no such module: its functions go to them as they are.
            from pyspark import cloudpickle  # noqa: PLC0415 - loaded by now

            module = sys.modules[self._steps.__module__]
            cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
        # The epoch that routing was started with; None: none, or not known.
        self._epoch: int | None = None

    def lanes(self) -> list[list[Part]]:
        """Return the parts: those that go on have a thread each, the others share one."""
        settings, found = self._settings, []
        if settings.route is not None:
            found.append([Part("route", self._pooled(self._route))])
        if settings.archive is not None:
            schedule = Schedule(settings.archive.every)
            found.append([Part("archive", self._pooled(self._archive), schedule)])
        timed = [
            (name, section, run)
            for name, section, run in (
                ("optimize", settings.optimize, self._optimize),
                ("vacuum", settings.vacuum, self._vacuum),
                ("report", settings.report, self._report),
            )
            if section is not None
        ]
        if timed:
            found.append(
                [
                    Part(name, self._pooled(run), Schedule(section.every, section.at))
                    for name, section, run in timed
                ]
            )
        return found

    def lost(self) -> str:
        """Say that Spark is gone, if it is: no part can go on then."""
        return "Spark has ended" if sessions.is_lost(self._spark) else ""

    def cancel(self, parts: list[Part]) -> None:
        """Cut off the jobs that parts are at."""
        with suppress(Exception):
            for part in parts if not sessions.is_connect(self._spark) else ():
                self._spark.sparkContext.cancelJobGroup(_group(part))

    def end(self, seconds: float) -> None:
        """Stop Spark, within a bound; its JVM does not outlive that."""

        def stop() -> None:
            # Without its JVM nothing is left to stop.
            with suppress(Exception):
                self._spark.stop()

        stopping = threading.Thread(target=stop, name="penstock-end", daemon=True)
        stopping.start()
        stopping.join(seconds)
        sessions.kill_jvm()

    def _pooled(self, run: Callable[[Part], int]) -> Callable[[Part], int]:
        def pooled(part: Part) -> int:
            if not sessions.is_connect(self._spark):
                context = self._spark.sparkContext
                context.setLocalProperty("spark.scheduler.pool", part.name)
                context.setJobGroup(_group(part), f"penstock pipeline: {part.name}")
            return run(part)

        return pooled

    # --- routing -------------------------------------------------------------------------------

    def _route(self, part: Part) -> int:
        client = FlightStore(located(self._settings, patient=False))
        if self._epoch is not None and (now := client.log_stats().epoch) > self._epoch:
            raise Superseded(str(fenced(self._epoch, now)))
        try:
            query = self._begin(client)
            try:
                self._watch(query, part)
            finally:
                query.stop()
        except Exception as error:
            if is_fenced(error):
                raise Superseded(sessions.one_line(error)) from None
            raise
        return 0

    def _begin(self, client: FlightStore) -> StreamingQuery:
        """Start the query. Whoever takes a later epoch than this one takes over."""
        settings = self._settings.route
        assert settings is not None
        given: dict[str, Any] = {"checkpoint": settings.checkpoint}
        if settings.max_offsets is not None:
            given["max_offsets"] = settings.max_offsets
        self._epoch = None
        try:
            if self._steps is None:
                return route(self._location, spark=self._spark, **given)
            own = own_pipeline(self._spark, self._location)
            return own.transform(self._steps, payload=settings.payload).start(**given)
        finally:
            # Not known, if the broker is away now: the next start then takes over unasked.
            with suppress(PenstockError):
                self._epoch = client.log_stats().epoch

    def _watch(self, query: StreamingQuery, part: Part) -> None:
        """Wait for the end of the query, and note its micro-batches meanwhile."""
        seen: int | None = None
        idle = False
        while not part.stopping.is_set():
            if query.awaitTermination(_LOOK_SECONDS):
                if part.stopping.is_set():
                    return
                raise StorageFailed("the query was stopped, and not by this process")
            last = query.lastProgress
            now_ms = SystemClock().now_ms()
            if last is not None and last.numInputRows and last.batchId != seen:
                # Only the last one is told: the others are counted by its number.
                part.seconds.add(last.batchDuration / 1000)
                part.worked(now_ms, runs=1 if seen is None else last.batchId - seen)
                seen, idle = last.batchId, False
            elif query.status["message"].startswith("Waiting for"):
                # With nothing to route there is no micro-batch: that it looks is success, too.
                part.worked(now_ms, runs=0)
                if not idle and seen is None:
                    log.info("route runs, and has nothing to do yet")
                idle = True

    # --- jobs ----------------------------------------------------------------------------------

    def _archive(self, part: Part) -> int:
        settings = self._settings.archive
        assert settings is not None
        done = jobs.archive(
            self._spark,
            self._location,
            settings.place,
            queues=settings.queues,
            states=settings.states,
            keep_ms=settings.keep,
            payload=settings.payload,
            trim=settings.trim,
        )
        if done.files or done.trimmed:
            rows = ", ".join(f"{count} {table}" for table, count in done.rows.items())
            log.info("%s: archived %s; trimmed %d messages", part.name, rows, done.trimmed)
        return sum(done.rows.values())

    def _optimize(self, part: Part) -> int:
        settings = self._settings.archive
        assert settings is not None
        done = jobs.optimize(settings.place)
        count = sum(done.joined.values())
        log.info("%s: joined %d files to %d", part.name, count, sum(done.made.values()))
        return 0

    def _vacuum(self, part: Part) -> int:
        archive, settings = self._settings.archive, self._settings.vacuum
        assert archive is not None
        assert settings is not None
        gone = jobs.vacuum(archive.place, retention_hours=settings.retention // 3_600_000)
        log.info("%s: removed %d files", part.name, sum(gone.files.values()))
        return 0

    def _report(self, part: Part) -> int:
        settings, archive = self._settings.report, self._settings.archive
        assert settings is not None
        there = archive is not None and _is_archive(archive.place)
        frames = jobs.report(
            self._spark,
            self._location,
            queues=settings.queues,
            archive=archive.place if archive is not None and there else None,
        )
        place = _save(settings, lambda directory: jobs.save_report(frames, directory))
        log.info("%s: written to %s", part.name, place)
        return 0


def _group(part: Part) -> str:
    return f"penstock-{part.name}"


def _is_archive(place: str) -> bool:
    """Whether there is an archive at a place: before its first run there is none to read."""
    from penstock.spark.delta import Archive  # noqa: PLC0415 - needs an extra

    with suppress(PenstockError):
        return bool(Archive.at(place).tables())
    return False


def _save(settings: Report, write: Callable[[Path], object]) -> Path:
    """Write a report under the name of its time, whole or not at all; remove the oldest ones."""
    root = Path(settings.place)
    name = datetime.fromtimestamp(SystemClock().now_ms() / 1000, UTC).strftime(_REPORT)
    partial = root / f".{name}.part"
    shutil.rmtree(partial, ignore_errors=True)
    write(partial)
    partial.rename(root / name)
    for old in sorted(each for each in root.iterdir() if _is_report(each))[: -settings.keep]:
        shutil.rmtree(old, ignore_errors=True)
    return root / name


def _is_report(place: Path) -> bool:
    try:
        datetime.strptime(place.name, _REPORT).replace(tzinfo=UTC)
    except ValueError:
        return False
    return place.is_dir()
