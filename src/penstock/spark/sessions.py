"""Sessions of Spark with defaults that suit Penstock, and what jobs do with one.

They read tables, also several of one moment of a broker, and translate Spark's errors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import pyspark
from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark import SparkConf, SparkContext, SparkFiles
from pyspark.errors import AnalysisException, PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

from penstock import limits
from penstock.errors import InvalidInput, PenstockError
from penstock.flight.client import FlightStore
from penstock.flight.location import Location, locate
from penstock.flight.protocol import error_named
from penstock.spark.delta import Archive

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame

    from penstock.flight.protocol import HeldSnapshot

DEFAULTS: Final[Mapping[str, str]] = {
    # Times of the tables are UTC; so are those that Spark shows.
    "spark.sql.session.timeZone": "UTC",
    # Tables of a broker are small: two hundred shuffle partitions would be as many empty tasks.
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "50000",
    # An error of the source is then one line that says what is wrong, not a stack of Python's.
    "spark.sql.execution.pyspark.udf.hideTraceback.enabled": "true",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}
"""The settings of a session that :func:`session` starts, where the user has set nothing else.

On a cluster Spark chooses the last two.
"""

logger = logging.getLogger(__name__)

# The JVM starts in half the time; long analytics want the second compiler: session(quick=False).
_QUICK_JVM: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
# The short forms of settings in the arguments of spark-submit.
_FLAGS: Final = {
    "--master": "spark.master",
    "--name": "spark.app.name",
    "--driver-java-options": "spark.driver.extraJavaOptions",
}


def session(
    master: str | None = None,
    *,
    name: str = "penstock",
    quick: bool = True,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return the running session as it is, or start one.

    >>> spark = session("local[2]")                                     # doctest: +SKIP
    >>> spark.read.format("penstock").option("table", "queues").load()  # doctest: +SKIP

    A new session has the settings of :data:`DEFAULTS`, and ``local[*]`` for its master, only where
    neither the arguments, nor ``spark-submit``, nor ``spark-defaults.conf`` say something else.
    ``conf`` adds settings, also to a running session, as Spark's own builder does.
    ``local[2,4]`` tries a task up to four times, as a cluster does; ``local[2]`` fails at once.
    ``sc://HOST:PORT`` is a Spark Connect server; settings that it has stay as they are.
    """
    given = dict(conf or {})
    builder = SparkSession.builder
    if SparkContext._active_spark_context is not None:  # noqa: SLF001 - Spark has no public name
        return _shipped(_built(builder, given))
    connected = "SPARK_CONNECT_MODE_ENABLED" in os.environ
    running = SparkSession.getActiveSession() if connected else None
    if master is None and running is not None:
        return running
    remote = master or os.environ.get("SPARK_REMOTE", "")
    if remote.startswith("sc://"):
        spark = _built(builder.remote(remote), given)
        if spark is not running:
            # Only what belongs to a session can be set from here.
            own = {key: value for key, value in DEFAULTS.items() if key.startswith("spark.sql.")}
            for key in own.keys() - spark.conf.getAll.keys():
                spark.conf.set(key, own[key])
        return spark
    said = _said()
    if master is not None:
        said["spark.master"] = given["spark.master"] = master
    defaults = {**DEFAULTS, "spark.master": "local[*]", "spark.app.name": name}
    if quick:
        defaults["spark.driver.extraJavaOptions"] = _QUICK_JVM
    if {**said, **given}.get("spark.master", "local").startswith("local"):
        if "spark.pyspark.python" not in {*said, *given}:
            # Spark would take the first python3 of the path for its workers, which need not be
            # the one that this package is installed for.
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    else:
        del defaults["spark.driver.bindAddress"], defaults["spark.driver.host"]
        if "PYSPARK_PYTHON" not in os.environ and "spark.pyspark.python" not in {*said, *given}:
            _choose_python()
    unsaid = {key: value for key, value in defaults.items() if key not in said}
    return _shipped(_started(builder, {**unsaid, **given}))


# Loggers of pyspark that write errors on standard error, beside raising them: in JSON, with stacks.
_ERRORS_AGAIN: Final = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")


class _StartNoise:
    """The standard error of the JVM: of its start nothing is shown, unless it fails; then all.

    A dozen lines that nobody can do anything about: modules, host name, native library, log levels.
    ``silent``: later lines are not shown either, as those of Python processes that Spark starts.
    """

    def __init__(self, *, silent: bool) -> None:
        self._kept: list[bytes] | None = []
        self._silent = silent
        self._lock = threading.Lock()
        out, self.end = os.pipe()
        # The one of now: a program may lead its own elsewhere for as long as Spark starts.
        self._shown = os.dup(2)
        args = (open(out, "rb"),)  # noqa: PTH123, SIM115 - the thread closes it
        threading.Thread(target=self._run, args=args, name="penstock-jvm", daemon=True).start()

    def _run(self, lines: BinaryIO) -> None:
        with lines:
            for line in lines:
                with self._lock:
                    if self._kept is not None:
                        self._kept.append(line)
                    elif not self._silent:
                        self._write(line)

    def over(self, *, failed: bool) -> None:
        """Say what comes from now on, and what the start has said if it has failed."""
        with self._lock:
            kept, self._kept = self._kept or [], None
            self._silent = self._silent and not failed
            for line in kept if failed else ():
                self._write(line)

    def _write(self, line: bytes) -> None:
        # Nobody may be there to read it.
        with contextlib.suppress(OSError):
            os.write(self._shown, line)


def _started(builder: SparkSession.Builder, settings: Mapping[str, str]) -> SparkSession:
    """Start a JVM, whose start is quiet, and a session in it."""
    if "PYSPARK_GATEWAY_PORT" in os.environ or SparkContext._gateway is not None:  # noqa: SLF001
        return _built(builder, settings)
    silent = settings.get("spark.log.level") == "OFF"
    for name in _ERRORS_AGAIN if silent else ():
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
    noise, failed = _StartNoise(silent=silent), True
    try:
        conf = SparkConf()
        conf.setAll(list(settings.items()))
        try:
            gateway = launch_gateway(conf, {"stderr": noise.end})  # type: ignore[no-untyped-call]
        finally:
            os.close(noise.end)
        SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001
        spark = _built(builder, settings)
        failed = False
    finally:
        noise.over(failed=failed)
    return spark


def _built(builder: SparkSession.Builder, settings: Mapping[str, str]) -> SparkSession:
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _shipped(spark: SparkSession) -> SparkSession:
    """Make a package that came by ``--py-files`` known to Spark and to the executors.

    Spark looks for data sources only where packages are installed, and takes no wheel for a package
    of the executors. A wheel is a zip: under that name Spark does.
    """
    context = spark.sparkContext
    names = [name for name in context.getConf().get("spark.submit.pyFiles", "").split(",") if name]
    files = [Path(SparkFiles.get(Path(name).name)) for name in names]
    known = context.environment.get("PYTHONPATH", "").split(os.pathsep)
    if not files or str(files[0]) in known:
        return spark
    for wheel in files:
        if wheel.suffix == ".whl" and not wheel.with_suffix(".zip").exists():
            # Executors fetch it from here; Spark removes the directory when the session stops.
            context.addPyFile(str(shutil.copy(wheel, wheel.with_suffix(".zip"))))
    # The process on the driver that plans a stream gets this, but not the list of packages.
    paths = [*map(str, files), *filter(None, known)]
    context.environment["PYTHONPATH"] = os.pathsep.join(paths)
    from penstock.spark.source import PenstockSource  # noqa: PLC0415 - it imports this module

    with contextlib.suppress(AnalysisException):  # It is installed, and known by that.
        spark.dataSource.register(PenstockSource)
    return spark


def _said() -> dict[str, str]:
    """Return the settings that the user has made for a session that is not there yet."""
    if "PYSPARK_GATEWAY_PORT" in os.environ or SparkContext._gateway is not None:  # noqa: SLF001
        # Started by spark-submit: its JVM knows its arguments and files.
        SparkContext._ensure_initialized()  # noqa: SLF001
        return dict(SparkConf().getAll())
    home = Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent)
    place = Path(os.environ.get("SPARK_CONF_DIR") or home / "conf")
    said = _of_file(place / "spark-defaults.conf")
    arguments = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))
    # Both --master local[2] and --master=local[2].
    words = (each.split("=", 1) if each.startswith("--") else [each] for each in arguments)
    for flag, value in pairwise(chain.from_iterable(words)):
        if flag in {"--conf", "-c"}:
            key, _, said_value = value.partition("=")
            said[key] = said_value
        elif flag == "--properties-file":
            said |= _of_file(Path(value))
        elif flag in _FLAGS:
            said[_FLAGS[flag]] = value
    if "MASTER" in os.environ:
        said.setdefault("spark.master", os.environ["MASTER"])
    return said


def _of_file(path: Path) -> dict[str, str]:
    """Return the settings of a file of Java properties, as Spark reads it."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    pairs = (re.split(r"\s*[=:\s]\s*", line.strip(), maxsplit=1) for line in lines)
    return {
        pair[0]: pair[1] if len(pair) > 1 else ""
        for pair in pairs
        if pair[0] and not pair[0].startswith(("#", "!"))
    }


def _choose_python() -> None:
    """Make Spark run this Python if the one that it would choose can't run the source.

    Spark takes the first python3 of the path, for workers and to plan reads here. That of a virtual
    environment which is not activated is not it: the source would not be found.
    """
    first = shutil.which("python3")
    if first is not None and Path(first).parent == Path(sys.executable).parent:
        return
    look = "from importlib.util import find_spec as f; print(f('penstock') and f('pyspark') and 1)"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = [first or "", "-c", look]
        found = subprocess.run(command, capture_output=True, timeout=30, check=False)  # noqa: S603
        if found.stdout.strip() == b"1":
            return
    os.environ["PYSPARK_PYTHON"] = sys.executable
    logger.warning(
        "Spark runs %s here and on its workers, since %s has no penstock: set PYSPARK_PYTHON if "
        "that of the workers is elsewhere",
        sys.executable,
        first or "python3",
    )


_setting: Final = threading.Lock()


@contextmanager
def settings_for_query(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Give a streaming query that is started within settings of its own.

    Spark copies the settings of a session when a query starts. Settings that the user has made
    stay; the others are set for as long as it takes to start the query.
    """
    with _setting:
        _use_in_thread(spark)
        said = spark.conf.getAll
        unsaid = {key: value for key, value in settings.items() if key not in said}
        try:
            for key, value in unsaid.items():
                spark.conf.set(key, value)
            yield
        finally:
            for key in unsaid:
                spark.conf.unset(key)


def _use_in_thread(spark: SparkSession) -> None:
    """Make a session the one of this thread: there Spark looks for the source of a stream's sink.

    A thread that has not made the session has none.
    """
    if not is_connect(spark):
        java = SparkSession._get_j_spark_session_class(spark._jvm)  # noqa: SLF001
        java.setActiveSession(spark._jsparkSession)  # noqa: SLF001


def is_connect(spark: SparkSession) -> bool:
    """Say whether a session talks to a Spark Connect server, and has no JVM at hand."""
    return getattr(spark, "sparkContext", None) is None


def parallelism(spark: SparkSession) -> int:
    """Return how many tasks Spark would make of a read by default."""
    if not is_connect(spark):
        return int(spark.sparkContext.defaultParallelism)
    # Nobody can be asked, so it is seen from how many parts a range is cut into.
    parts = spark.range(limits.MAX_PARTITIONS).select(F.spark_partition_id().alias("part"))
    return int(parts.agg(F.max("part")).collect()[0][0]) + 1


# --- jobs -----------------------------------------------------------------------------------------

FROM_SPARK: Final = (PySparkException, Py4JJavaError)
"""The errors that Spark raises for anything that went wrong on its side."""

_OURS: Final = re.compile(r"\bpenstock\.errors\.(\w+): (.*)")


def revived(error: BaseException) -> PenstockError | None:
    """Return the error of Penstock inside an error of Spark, if there is one.

    Spark gives back the error of a task or of the source as a text within a text.
    """
    found = _OURS.search(str(error))
    return error_named(found[1], found[2].strip()) if found else None


# The last line of a stack of Python's calls.
_RAISED: Final = re.compile(r"^(?:[\w.]+\.)?([A-Z]\w*(?:Error|Exception)\w*: .+)$", re.MULTILINE)
# Where a Java exception was called, and which query it has ended: what it says comes after that.
_CALLED: Final = re.compile(
    r"\AAn error occurred while calling .*\n: |"
    r"\[STREAM_FAILED\] Query \[id = \S+, runId = \S+\] terminated with exception: | SQLSTATE: \w+|"
    r"(?:[\w.]+: )?Job aborted due to stage failure: .*?executor [^)]*\): "
)
_CAUSE: Final = re.compile(r"^Caused by: (.+)$", re.MULTILINE)


def one_line(error: BaseException) -> str:
    """Tell an error, also one of Spark with the stacks of two languages, in one line."""
    ours = error if isinstance(error, PenstockError) else revived(error)
    if ours is not None:
        return " ".join(str(ours).split())
    text = _CALLED.sub("", str(error))
    raised = _RAISED.findall(text) if "Traceback" in text else []
    line = raised[-1] if raised else next((each for each in text.splitlines() if each.strip()), "")
    if line.startswith("===") or line.rstrip().endswith(":"):
        # The plan of the query follows, or a stack.
        line = next(
            reversed(_CAUSE.findall(text)), f"Spark gives no reason ({type(error).__name__})"
        )
    plain = isinstance(error, FROM_SPARK) or raised
    return " ".join((line if plain else f"{type(error).__name__}: {line}").split())


def is_lost(spark: SparkSession) -> bool:
    """Whether a session has no JVM any more, or one whose Spark was stopped."""
    if is_connect(spark):
        return False
    gateway = SparkContext._gateway  # noqa: SLF001 - Spark has no public name
    process = getattr(gateway, "proc", None)
    if gateway is None or (process is not None and process.poll() is not None):
        return True
    try:
        return bool(spark.sparkContext._jsc.sc().isStopped())  # noqa: SLF001
    except (*FROM_SPARK, Py4JError, OSError, AttributeError):
        return True


def kill_jvm() -> None:
    """End the JVM that this process has started, at once."""
    process = getattr(SparkContext._gateway, "proc", None)  # noqa: SLF001
    if process is not None:
        process.kill()
        process.wait()


@contextmanager
def translated() -> Iterator[None]:
    """Raise errors of Penstock that went through Spark with their own types."""
    try:
        yield
    except FROM_SPARK as error:
        ours = revived(error)
        if ours is None:
            raise
        raise ours from None


def read(
    spark: SparkSession,
    location: str,
    table: str,
    *,
    queues: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    **options: Any,
) -> DataFrame:
    """Read a table of a broker; the broker sends no other rows and columns than are asked for.

    >>> read(spark, "grpc://127.0.0.1:8815", "log",
    ...      columns=["offset", "group"], where="offset > 999000")       # doctest: +SKIP

    ``where`` is a condition on columns of the table, ``filter`` one on attributes. ``options``:
    those, and all others that the data source has.
    """
    if "includeArchive" in options:
        # The source is planned in a process of its own, whose environment is the session's.
        options = {**Archive.at(options["includeArchive"]).storage, **options}
    reader = spark.read.format("penstock").options(table=table, **place_of(location), **options)
    if queues is not None:
        reader = reader.option("queue", ",".join(queues))
    if columns is not None:
        reader = reader.option("columns", ",".join(columns))
    with translated():
        return reader.load()


def milliseconds(text: str) -> int:
    """Turn ``500ms``, ``30s``, ``5m`` or ``1h`` into milliseconds; a bare number is ms."""
    found = re.fullmatch(r"(\d{1,9})\s*(ms|s|m|h)?", text)
    if found is None:
        raise InvalidInput(f"{text!r:.100} is not a time like 5m, 30s or 500ms")
    return int(found[1]) * {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, None: 1}[found[2]]


def located(
    location: str,
    *,
    token: str | None = None,
    ca: str | Path | None = None,
    retry_for: str | None = None,
) -> Location:
    """Return the place of a broker that a job works on, which is waited for if it is away.

    ``retry_for``, such as ``"5m"``, is for how long; by default as a location says that has it.
    """
    retry_ms = None if retry_for is None else milliseconds(retry_for)
    if retry_ms is None and not (isinstance(location, Location) and location.retry_ms is not None):
        retry_ms = limits.MAX_AWAY_MS
    return locate(location, token=token, ca=ca, retry_ms=retry_ms)


def place_of(location: str) -> dict[str, str]:
    """Return the options of the data source that name a broker, with the access to it."""
    place = locate(location)
    names = ("token", "ca", "certificate", "key")
    options = {"server": str(place), **dict(zip(names, place.access, strict=True))}
    if place.retry_ms is not None:
        options["retryFor"] = f"{place.retry_ms}ms"
    return {name: value for name, value in options.items() if value}


def pinned(frame: DataFrame) -> DataFrame:
    """Take the snapshot now and keep its rows: every later use sees the same ones.

    A lost executor then fails the job, where a recomputation would read another moment.
    """
    with translated():
        return frame.localCheckpoint(eager=True)


# --- snapshots ------------------------------------------------------------------------------------


class PinnedSnapshot:
    """A snapshot that is open: its tables, and the options that read from it.

    ``at`` is its time by the broker's clock.
    """

    def __init__(self, spark: SparkSession | None, location: str, held: HeldSnapshot) -> None:
        self._spark = spark
        self._location = location
        self._name = held.snapshot
        self.at = datetime.fromtimestamp(held.at_ms / 1000, UTC)

    @property
    def options(self) -> dict[str, str]:
        """The options of ``spark.read.format("penstock")`` that read from this snapshot."""
        return {**place_of(self._location), "snapshot": self._name}

    def table(self, name: str, **options: Any) -> DataFrame:
        """Return a table of the snapshot, with more options of the data source if wanted."""
        spark = self._spark or session()
        return read(spark, self._location, name, snapshot=self._name, **options)


@contextmanager
def snapshot(
    location: str,
    *,
    spark: SparkSession | None = None,
    token: str | None = None,
    ca: str | Path | None = None,
) -> Iterator[PinnedSnapshot]:
    """Pin a moment of a broker: every table that is read from it is as it was then.

    >>> with snapshot("grpc://127.0.0.1:8815") as then:                  # doctest: +SKIP
    ...     every = then.table("active").select("queue", "message_id").union(
    ...         then.table("done").select("queue", "message_id"))
    ...     every.count()

    The broker keeps it while the block runs, and deleted data with it: leave it soon. DataFrames of
    it can't be read afterwards, unless they are cached.
    """
    client = FlightStore(location, token=token, ca=ca)
    held = client.hold_snapshot()
    over = threading.Event()

    def keep() -> None:
        while not over.wait(limits.MIN_VIEW_IDLE_MS / 3_000):
            try:
                client.hold_snapshot(held.snapshot)
            except InvalidInput:
                # It is gone: the next read says so.
                return
            except PenstockError:
                # A broker that is away for a while.
                continue

    keeper = threading.Thread(target=keep, name="penstock-snapshot", daemon=True)
    keeper.start()
    try:
        yield PinnedSnapshot(spark, client.location, held)
    finally:
        over.set()
        with contextlib.suppress(PenstockError):
            client.briefly().drop_snapshot(held.snapshot)
