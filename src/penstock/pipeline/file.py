"""The file of a pipeline: read, checked, and everything that is wrong with it told at once.

A section is a struct, a key one of its fields, with the words of the docs beside its type. Text
that names a place begins at the directory of the file.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
import tomllib
import typing
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeAlias, cast

import msgspec
from msgspec import Meta

from penstock import limits
from penstock.errors import InvalidInput, PenstockError, did_you_mean
from penstock.flight.location import TOKEN_VARIABLE, Location, locate
from penstock.server.config import UNITS_MS, Duration, amount, parse_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS
_LEAST_MS: Final = 1_000
_MASTER: Final = re.compile(r"local|local\[(\*|\d+)(,\d+)?\]|(spark|sc|k8s)://\S+|yarn")


class Place(str):
    """A directory that is made if it is not there; or a URL, where the key takes one."""

    __slots__ = ()


class FileName(str):
    """A file that is there."""

    __slots__ = ()


class TimeOfDay(int):
    """Milliseconds since midnight in UTC, written as ``"03:30"``."""

    __slots__ = ()


class Steps(str):
    """A function, written as ``"module:function"``."""

    __slots__ = ()


class Master(str):
    """Where Spark runs its tasks."""

    __slots__ = ()


Count: TypeAlias = Annotated[int, Meta(ge=1)]


class _Section(msgspec.Struct, frozen=True, kw_only=True):
    """A section of the file."""


class Broker(_Section, frozen=True, kw_only=True):
    """Section ``[broker]``."""

    location: Annotated[
        str,
        "The broker's Flight address, such as grpc://127.0.0.1:8815. `--location` and "
        "PENSTOCK_FLIGHT count before it.",
    ] = ""
    token_file: Annotated[
        FileName, "A file with the key, ID:SECRET. PENSTOCK_TOKEN counts before it."
    ] = FileName("")
    ca: Annotated[FileName, "Certificate authority of the broker, PEM."] = FileName("")
    certificate: Annotated[FileName, "This process's certificate, PEM."] = FileName("")
    key: Annotated[FileName, "The private key of that certificate, PEM."] = FileName("")
    retry_for: Annotated[
        Duration, "How long a part waits for a broker that was there and is away, before it fails."
    ] = Duration(limits.MAX_AWAY_MS)


class Spark(_Section, frozen=True, kw_only=True):
    """Section ``[spark]``."""

    master: Annotated[
        Master, "Where Spark runs its tasks; without it as Spark's own settings say, or local[*]."
    ] = Master("")
    quick: Annotated[
        bool, "A JVM that starts in half the time, and is slower at long analytics."
    ] = False
    conf: Annotated[
        dict[str, str | int | float | bool],
        'Settings of Spark, in a section of their own: [spark.conf], "spark.driver.memory" = "2g".',
    ] = {}


class Operations(_Section, frozen=True, kw_only=True):
    """Section ``[operations]``."""

    address: Annotated[
        str, "Where /health, /ready, /status and /metrics are, without key and TLS; or off."
    ] = "127.0.0.1:8818"


class Log(_Section, frozen=True, kw_only=True):
    """Section ``[log]``."""

    level: Annotated[Literal["debug", "info", "warning", "error"], "Lowest level of a line."] = (
        "info"
    )
    format: Annotated[Literal["text", "json"], "Format of a line."] = "text"


class Route(_Section, frozen=True, kw_only=True):
    """Section ``[route]``."""

    checkpoint: Annotated[Place, "A directory, or a URL, for the query's checkpoint."]
    max_offsets: Annotated[
        Count | None, "Messages in one micro-batch at the most; without it the route job decides."
    ] = None
    steps: Annotated[
        Steps,
        "A transformation of the log, `module:function`, that adds columns for filters; looked for "
        "in the file's directory first.",
    ] = Steps("")
    payload: Annotated[bool, "Give the steps the column `payload` too."] = False


class Archive(_Section, frozen=True, kw_only=True):
    """Section ``[archive]``."""

    place: Annotated[Place, "A directory that driver and executors share, or s3://BUCKET/PREFIX."]
    keep: Annotated[Duration, "Leave in the store what ended less long ago."] = Duration(0)
    every: Annotated[Duration, "How long to wait after a run."] = Duration(60_000)
    queues: Annotated[tuple[str, ...] | None, "Only these queues."] = None
    states: Annotated[tuple[Literal["done", "failed"], ...], "Only these states."] = (
        "done",
        "failed",
    )
    payload: Annotated[bool, "Archive payloads too."] = True
    trim: Annotated[bool, "Remove from the store what is archived."] = True


class Optimize(_Section, frozen=True, kw_only=True):
    """Section ``[optimize]``."""

    every: Annotated[Duration, "How often small files of the archive are joined."] = Duration(
        _DAY_MS
    )
    at: Annotated[TimeOfDay, "A time of day, UTC, that the runs are counted from."] = TimeOfDay(0)


class Vacuum(_Section, frozen=True, kw_only=True):
    """Section ``[vacuum]``."""

    every: Annotated[Duration, "How often files are removed that the archive does not need."] = (
        Duration(7 * _DAY_MS)
    )
    at: Annotated[TimeOfDay, "A time of day, UTC, that the runs are counted from."] = TimeOfDay(0)
    retention: Annotated[Duration, "How long such a file stays; a week at the least."] = Duration(
        7 * _DAY_MS
    )


class Report(_Section, frozen=True, kw_only=True):
    """Section ``[report]``."""

    place: Annotated[Place, "A directory; each report is in one of its own, named by its time."]
    every: Annotated[Duration, "How often a report is made."] = Duration(_DAY_MS)
    at: Annotated[TimeOfDay, "A time of day, UTC, that the runs are counted from."] = TimeOfDay(0)
    keep: Annotated[Count, "How many reports stay."] = 14
    queues: Annotated[tuple[str, ...] | None, "Only these queues."] = None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a file says, checked; a part whose section is missing is None."""

    broker: Broker = Broker()
    spark: Spark = Spark()
    operations: Operations = Operations()
    log: Log = Log()
    route: Route | None = None
    archive: Archive | None = None
    optimize: Optimize | None = None
    vacuum: Vacuum | None = None
    report: Report | None = None


SECTIONS: Final[dict[str, type[_Section]]] = {
    "broker": Broker,
    "spark": Spark,
    "operations": Operations,
    "log": Log,
    "route": Route,
    "archive": Archive,
    "optimize": Optimize,
    "vacuum": Vacuum,
    "report": Report,
}
PARTS: Final = ("route", "archive", "optimize", "vacuum", "report")


class Read(NamedTuple):
    """A file that was read: its settings, None if something is wrong, and what that is."""

    settings: Settings | None
    problems: list[str]


def read(path: Path, **others: str | None) -> Read:
    """Read a file; ``others`` are ``location`` and ``address`` from the command line, if given.

    Each problem is a line that names the file, the section, the key and what would be right.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return Read(None, [f"{path}: the file can't be read: {error.strerror}"])
    except ValueError as error:
        return Read(None, [f"{path}: the file is not TOML: {error}"])
    problems: list[str] = []
    base = path.absolute().parent
    sections: dict[str, Any] = {}
    for name, given in tree.items():
        if name not in SECTIONS:
            hint = did_you_mean(name, SECTIONS)
            problems.append(f"[{name:.100}]: there is no such section; {hint}")
        elif not isinstance(given, dict):
            problems.append(f"[{name}]: it is a section, not {given!r:.100}")
        else:
            values, wrong = _section(SECTIONS[name], given, base)
            problems += [f"[{name}] {each}" for each in wrong]
            sections[name] = None if wrong else SECTIONS[name](**values)
    for section, key in (("broker", "location"), ("operations", "address")):
        known = sections.setdefault(section, SECTIONS[section]())
        if others.get(key) and known is not None:
            sections[section] = msgspec.structs.replace(known, **{key: others[key]})
    problems += _contradictions(sections)
    told = [f"{path}: {each}" for each in problems]
    return Read(None if told else Settings(**sections), told)


def _section(
    kind: type[_Section], given: Mapping[str, Any], base: Path
) -> tuple[dict[str, Any], list[str]]:
    """Convert the keys of a section; return its values, and what is wrong with it."""
    hints = typing.get_type_hints(kind, include_extras=True)
    values, wrong = {}, []
    for key, value in given.items():
        if key == "token" and kind is Broker:
            wrong.append(
                "token: a secret has no place in this file: set PENSTOCK_TOKEN, or name a file "
                "with token_file"
            )
        elif key not in hints:
            wrong.append(f"{key:.100}: there is no such key; {did_you_mean(key, hints)}")
        else:
            try:
                found = msgspec.convert(value, hints[key], dec_hook=_special)
            except msgspec.ValidationError:
                # Of the other kinds msgspec knows only the name.
                wrong.append(f"{key}: it is {_words(hints[key])}, not {value!r:.100}")
                continue
            values[key] = _placed(found, base)
    missing = [each.name for each in msgspec.structs.fields(kind) if each.required]
    wrong += [f"{key}: it is missing: {_words(hints[key])}" for key in missing if key not in given]
    return values, wrong


def _special(kind: type, value: Any) -> Any:
    if kind is Duration:
        return Duration(amount(value, UNITS_MS, "a duration"))
    if not isinstance(value, str) or not value:
        raise ValueError("it is a text")
    if kind is TimeOfDay:
        hour, _, minute = value.partition(":")
        if not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", value):
            raise ValueError("it is a time")
        return TimeOfDay((int(hour) * 60 + int(minute)) * 60_000)
    patterns: dict[type, str] = {Steps: r"[\w.]+:\w+", Master: _MASTER.pattern}
    if not re.fullmatch(patterns.get(kind, ".+"), value):
        raise ValueError("it has another form")
    return kind(value)


_WORDS: Final[dict[Any, str]] = {
    Duration: "a duration such as 30s, 5m, 12h or 7d",
    TimeOfDay: 'a time of day in UTC such as "03:30"',
    Place: "the name of a directory, or a URL where the key takes one",
    FileName: "the name of a file",
    Steps: "a function such as shop.pipeline:enrich",
    Master: "a master such as local[2], spark://HOST:PORT, sc://HOST:PORT, yarn or k8s://HOST",
    bool: "true or false",
    str: "a text",
    int: "a number from 1",
}


def _words(hint: Any) -> str:
    """Say what a key is."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in {Annotated, UnionType, typing.Union}:
        # Of a kind, or not given.
        return _words(inner[0])
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is dict:
        return "a section of texts, numbers, true and false"
    return f"a list: {_words(inner[0])} …" if origin is tuple else _WORDS[hint]


def _placed(value: Any, base: Path) -> Any:
    """Make a name of a file or directory whole."""
    if isinstance(value, Place | FileName) and "://" not in value:
        return type(value)(base / Path(value).expanduser())
    return value


def _contradictions(sections: Mapping[str, Any]) -> Iterator[str]:
    """Say what is wrong with keys whose values are each of the right kind."""
    if not any(name in sections for name in PARTS):
        yield f"there is nothing to run: give one of the sections {', '.join(PARTS)}"
    for name in ("optimize", "vacuum"):
        if name in sections and "archive" not in sections:
            yield f"[{name}]: it is about the archive, and there is no section [archive]"
    for name in PARTS:
        every = getattr(sections.get(name), "every", _LEAST_MS)
        if every < _LEAST_MS:
            yield f"[{name}] every: it is at least 1s, not {every}ms"
    broker, spark, operations = map(sections.get, ("broker", "spark", "operations"))
    if broker is not None and not broker.location:
        yield (
            "[broker] location: it is missing: the broker's Flight address, such as "
            "grpc://127.0.0.1:8815, here, in --location or in PENSTOCK_FLIGHT"
        )
    elif broker is not None:
        try:
            # Its text is checked, not the access.
            _ = Location(broker.location, ("", "", "", "")).addresses
        except PenstockError as error:
            yield f"[broker] location: {error}"
    for key in (key for key in (spark.conf if spark else ()) if not key.startswith("spark.")):
        yield f"[spark.conf] {key:.100}: a setting of Spark begins with spark."
    if operations is not None and operations.address != "off":
        try:
            parse_address(operations.address)
        except PenstockError as error:
            yield f"[operations] address: {error}"
    archive, vacuum = sections.get("archive"), sections.get("vacuum")
    if vacuum is not None and vacuum.retention < 7 * _DAY_MS:
        yield f"[vacuum] retention: it is at least 7d, not {vacuum.retention // _HOUR_MS}h"
    if archive is not None and not archive.states:
        yield "[archive] states: it is a list of 'done' or 'failed', and is empty"
    for name, at in (("archive", archive), ("report", sections.get("report"))):
        place = getattr(at, "place", "")
        scheme = place.partition("://")[0] if "://" in place else ""
        if scheme and (name == "report" or scheme != "s3"):
            also = " or s3://BUCKET/PREFIX" if name == "archive" else ""
            yield f"[{name}] place: it is a directory{also}, not {place:.100}"


def texts(settings: Settings) -> dict[str, list[tuple[str, str]]]:
    """Give every key by its section, as a person would write it; secrets are in none."""
    found = {}
    for name in SECTIONS:
        section = getattr(settings, name)
        if section is not None:
            keys = ((key, getattr(section, key)) for key in section.__struct_fields__)
            found[name] = [(key, text_of(value)) for key, value in keys]
    return found


def text_of(value: Any) -> str:
    """Write a value as a file has it, without quotes."""
    if isinstance(value, TimeOfDay):
        return f"{value // _HOUR_MS:02}:{value // 60_000 % 60:02}"
    if isinstance(value, Duration):
        units = [(unit, ms) for unit, ms in UNITS_MS.items() if unit and value % ms == 0]
        unit, ms = max(units, key=lambda each: each[1])
        return f"{value // ms}{unit}" if value else "0"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return ", ".join(f"{key}={text_of(each)}" for key, each in value.items())
    return ", ".join(value) if isinstance(value, tuple) else "" if value is None else str(value)


# --- this machine ---------------------------------------------------------------------------------


def lacking(path: Path, settings: Settings) -> list[str]:
    """Say what this machine lacks for a file: extras, Java, files, directories and the steps."""
    found = chain(_extras(settings), _files(settings), _places(settings), _steps(path, settings))
    return [f"{path}: {each}" for each in found]


def _extras(settings: Settings) -> Iterator[str]:
    needed = {"pyspark": "spark"} | ({"deltalake": "delta"} if settings.archive else {})
    for module, extra in needed.items():
        if find_spec(module) is None:
            yield f"the module {module} is missing: pip install 'penstock[{extra}]'"
    home = os.environ.get("JAVA_HOME", "")
    java = shutil.which(str(Path(home) / "bin" / "java") if home else "java")
    if java is None and not settings.spark.master.startswith("sc://"):
        yield "Spark needs Java 17 or 21: 'penstock doctor --need spark' says what is missing"


def _files(settings: Settings) -> Iterator[str]:
    broker, wrong = settings.broker, False
    for key in ("token_file", "ca", "certificate", "key"):
        name = getattr(broker, key)
        try:
            if name:
                Path(name).read_bytes()
        except OSError as error:
            wrong = True
            yield f"[broker] {key}: {name} can't be read: {error.strerror}"
    if not wrong:
        try:
            located(settings)
        except PenstockError as error:
            yield f"[broker]: {error}"


def _places(settings: Settings) -> Iterator[str]:
    for section, key in (("route", "checkpoint"), ("archive", "place"), ("report", "place")):
        name = getattr(getattr(settings, section), key, "")
        if not name or "://" in name:
            continue
        place = Path(name)
        # It is made if need be, but not what is above it: that may be a disk that is not mounted.
        there = place if place.exists() else place.parent
        if place.exists() and not place.is_dir():
            yield f"[{section}] {key}: {place} is a file: name a directory"
        elif not there.is_dir():
            yield f"[{section}] {key}: there is no directory {there}: make it, or name another"
        elif not os.access(there, os.W_OK | os.X_OK):
            yield f"[{section}] {key}: this user can't write to {there}"


def _steps(path: Path, settings: Settings) -> Iterator[str]:
    try:
        steps_of(path, settings)
    except InvalidInput as error:
        yield f"[route] steps: {error}"


def steps_of(path: Path, settings: Settings) -> Callable[[Any], Any] | None:
    """Import the steps of a file; None: it has none."""
    if settings.route is None or not settings.route.steps:
        return None
    module_name, _, name = settings.route.steps.partition(":")
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name
        why = f"{type(error).__name__}: {error}" if not missing else f"it is not in {folder}"
        text = f"module {module_name} can't be imported: {why}"
        raise InvalidInput(" ".join(text.split())[: limits.PIPELINE_LINE_CHARS]) from None
    steps = getattr(module, name, None)
    if not callable(steps):
        raise InvalidInput(f"module {module_name} has no function {name}")
    return cast("Callable[[Any], Any]", steps)


def located(settings: Settings, *, patient: bool = True) -> Location:
    """Return the broker's address with the access to it; ``patient`` waits for one that is away."""
    broker = settings.broker
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and broker.token_file:
        token = Path(broker.token_file).read_text(encoding="utf-8").strip()
    ca, certificate, key = (each or None for each in (broker.ca, broker.certificate, broker.key))
    retry_ms = broker.retry_for if patient else None
    return locate(
        broker.location, token=token, ca=ca, certificate=certificate, key=key, retry_ms=retry_ms
    )
