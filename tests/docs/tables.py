"""Tables of the docs that are written from the code.

``python -m tests.docs.tables`` writes them into the pages, between ``<!-- table: NAME -->`` and
``<!-- end -->``; ``make docs`` does so first. A test compares the pages with the code.
"""

from __future__ import annotations

import inspect
import re
import tempfile
import typing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import yaml

import penstock
from penstock.cli import main as cli
from penstock.clock import SystemClock
from penstock.flight.client import RouteStatus
from penstock.flight.location import locate
from penstock.pipeline.file import PARTS, text_of
from penstock.pipeline.file import SECTIONS as SECTIONS_OF_PIPELINE
from penstock.pipeline.pages import Pages, RoutingWatch
from penstock.pipeline.supervisor import Part
from penstock.server import running
from penstock.server.config import SECTIONS, SETTINGS, LoadedConfig, load
from penstock.server.metrics import CONTENTION
from penstock.server.sqs import OPERATIONS
from penstock.worker.stats import WorkerCollector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.core import Metric

    from penstock.server.config import Setting

DOCS: Final = Path(__file__).parents[2] / "docs"
_METRIC_COLUMNS: Final = ("metric", "type", "labels", "counts", "alerts")
_MARKED: Final = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), ["---"] * len(list(head)), *map(list, rows)]
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines)


def settings() -> str:
    """Write the server's settings: a table for each section of the file."""
    defaults = load(environment={}, flags={})
    parts = []
    for section in ("", *SECTIONS):
        found = [each for each in SETTINGS.values() if _section(each) == section]
        rows = [_setting(each, defaults) for each in found]
        title = f"## Section `{section}`" if section else "## Without a section"
        parts.append(
            f"{title}\n\n" + _table(("setting", "default", "flag and variable", "means"), rows)
        )
    return "\n" + "\n".join(parts) + "\n"


def _section(setting: Setting) -> str:
    return setting.path.rpartition(".")[0]


def _setting(setting: Setting, defaults: LoadedConfig) -> tuple[str, ...]:
    value = defaults.texts()[setting.path].value
    shown = ("off", "on")[value] if isinstance(value, bool) else str(value)
    kind = typing.get_args(setting.kind)[0]
    about = setting.about
    if typing.get_origin(kind) is Literal:
        choices = [f"`{each}`" for each in typing.get_args(kind) if each]
        about += f" One of {', '.join(choices)}."
    return (
        f"`{setting.path}`",
        f"`{shown}`" if shown else "",
        f"`{setting.flag}`<br>`{setting.variable}`",
        about,
    )


def metrics() -> str:
    """Write every metric: those of a server on RocksDB, and those of a SQL database."""
    with tempfile.TemporaryDirectory() as place:
        settings: dict[str, Any] = {"native": "127.0.0.1:0", "backup_directory": place}
        with running(f"rocksdb:{place}/store", **settings) as server:
            server.batcher.backups.look()
            server.metrics.read_store()
            families = list(server.metrics.registry.collect())
    rows = sorted(map(_metric, families), key=lambda row: (row[2] != "", row[0]))
    rows += [
        (f"`penstock_{name}_total`", "counter", "", f"{about} On a SQL database only.", "")
        for name, about in CONTENTION.values()
    ]
    return _table(_METRIC_COLUMNS, rows)


def worker_metrics() -> str:
    """Write every metric of a worker."""
    worker = penstock.Worker("memory:", "orders", print)
    return _table(_METRIC_COLUMNS, sorted(map(_metric, WorkerCollector(worker.stats).collect())))


def pipeline_metrics() -> str:
    """Write every metric of a pipeline."""
    families = [each for each in pipeline_families() if each.name.startswith("penstock_")]
    return _table(_METRIC_COLUMNS, sorted(map(_metric, families)))


def pipeline_families() -> list[Metric]:
    """Return the metrics of a pipeline that has every part."""
    pages = Pages(SystemClock())
    pages.parts = [Part(name, lambda _: 0) for name in PARTS]
    pages.watch = RoutingWatch(locate("grpc://127.0.0.1"))
    status = {"routing": "pipeline", "epoch": 1, "cursors": {0: 1}, "routed_up_to": 1, "end": 1}
    pages.watch.note(RouteStatus(**status, lag={0: 0}))  # type: ignore[arg-type]
    return list(pages.registry.collect())


def pipeline_settings() -> str:
    """Write the keys of a pipeline's file: a table for each section."""
    parts = []
    for name, section in SECTIONS_OF_PIPELINE.items():
        hints = typing.get_type_hints(section, include_extras=True)
        rows = []
        for field in msgspec.structs.fields(section):
            about = typing.get_args(hints[field.name])[-1].replace("|", "\\|")
            value = "required" if field.required else f"`{text_of(field.default)}`"
            if field.default_factory is not msgspec.NODEFAULT or value == "``":
                value = ""
            rows.append((f"`{field.name}`", value, about))
        parts.append(f"**`[{name}]`**\n\n" + _table(("key", "default", "means"), rows))
    return "\n" + "\n".join(parts) + "\n"


def _metric(family: Metric) -> tuple[str, ...]:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    labels = ", ".join(f"`{label}`" for label in family._labelnames)  # type: ignore[attr-defined]
    named = re.compile(rf"\b{name}(_bucket|_count|_sum)?\b")
    watching = [f"`{rule['alert']}`" for rule in _rules() if named.search(rule["expr"])]
    return f"`{name}`", family.type, labels, family.documentation, ", ".join(watching)


def alerts() -> str:
    """Write the alert rules of ``deploy/``."""
    rows = []
    for rule in _rules():
        expression = " ".join(rule["expr"].split()).replace("|", "\\|")
        lasts = f" for {rule['for']}" if "for" in rule else ""
        about = rule["annotations"]["description"]
        row = (f"`{rule['alert']}`", rule["labels"]["severity"], f"`{expression}`{lasts}", about)
        rows.append(row)
    return _table(("alert", "severity", "fires if", "what to look at"), rows)


def _rules() -> list[dict[str, Any]]:
    """Read the alert rules."""
    (group,) = yaml.safe_load((DOCS.parent / "deploy/prometheus/alerts.yaml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def sqs_operations() -> str:
    """Write the operations of SQS, with the first line of what each function says about itself."""
    rows = [(f"`{name}`", _about(operation)) for name, operation in OPERATIONS.items()]
    return _table(("operation", "does"), rows)


def _about(operation: Callable[..., Any]) -> str:
    if isinstance(operation, partial):
        # All four change labels of a queue: the first argument says how.
        operation = operation.args[0]
    return (inspect.getdoc(operation) or "").partition("\n")[0]


def commands() -> str:
    """Write the commands, with their section and text in ``penstock --help``."""
    rows = [
        (f"`penstock {name}`", about, title)
        for title, section in cli.SECTIONS.items()
        for name, (_, about) in section.items()
    ]
    return _table(("command", "does", "section"), rows)


TABLES: Final = {
    "commands": commands,
    "settings": settings,
    "metrics": metrics,
    "worker_metrics": worker_metrics,
    "pipeline_metrics": pipeline_metrics,
    "pipeline_settings": pipeline_settings,
    "alerts": alerts,
    "sqs_operations": sqs_operations,
}


def pages() -> list[Path]:
    """Find the pages that have such a table."""
    return [path for path in sorted(DOCS.rglob("*.md")) if _MARKED.search(path.read_text())]


def written(page: str) -> str:
    """Return a page with its tables as the code has them."""
    return _MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


if __name__ == "__main__":
    for path in pages():
        path.write_text(written(path.read_text()))
