"""An installation without an extra: whatever needs it names it, and the rest works."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from penstock.errors import MissingExtra, needs_extra
from penstock.server import running

if TYPE_CHECKING:
    from collections.abc import Iterator

# Runs the command line, or a line of Python, in a process where modules are not to be had.
WITHOUT = """
import sys
for name in sys.argv[1].split():
    sys.modules[name] = None
first, *rest = sys.argv[2:]
if first == "-c":
    exec(rest[0])
else:
    from penstock.cli.main import main
    sys.argv[1:] = [first, *rest]
    main()
"""
SPARK = "pyspark pandas numpy"


@pytest.fixture(scope="module")
def flight() -> Iterator[str]:
    with running("memory:", flight="127.0.0.1:0") as server:
        yield server.location("flight")


def without(modules: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, modules, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_status_of_the_pipeline_needs_no_spark(flight: str) -> None:
    done = without(SPARK, "pipeline", "status", "--location", flight)
    assert (done.returncode, done.stderr) == (0, "")
    assert "routing inline" in done.stdout


def test_clients_need_no_extra() -> None:
    with running("memory:", native="127.0.0.1:0") as server:
        script = f"import penstock; print(penstock.connect({server.location('native')!r}).queues())"
        done = without("uvloop httptools prometheus_client pyarrow jinja2", "-c", script)
    assert (done.stdout, done.stderr) == ("[]\n", "")


COMMANDS = [
    (SPARK, "pyspark", "spark", "pipeline report --location grpc://127.0.0.1:1"),
    ("pyarrow numpy", "pyarrow", "flight", "pipeline status --location grpc://127.0.0.1:1"),
    ("prometheus_client", "prometheus_client", "server", "serve --store memory:"),
    ("jinja2", "jinja2", "server", "serve --store memory: --http 127.0.0.1:0"),
    ("prometheus_client", "prometheus_client", "server", "up"),
    ("httptools", "httptools", "server", "serve --store memory: --http 127.0.0.1:0"),
    ("pyarrow", "pyarrow", "flight", "serve --store memory: --flight 127.0.0.1:0"),
    ("psycopg", "psycopg", "sql", "stats --store postgresql://127.0.0.1:1/none"),
    ("psycopg", "psycopg", "sql", "cluster status --store postgresql://127.0.0.1:1/none"),
    ("slatedb", "slatedb", "slatedb", "stats --store slatedb+file:///nowhere/at/all"),
]


@pytest.mark.parametrize(("modules", "named", "extra", "line"), COMMANDS)
def test_a_command_names_the_extra_that_it_needs(
    modules: str, named: str, extra: str, line: str
) -> None:
    done = without(modules, *line.split())
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert done.stderr.endswith(
        f" needs the module {named}: pip install 'penstock[{extra}]', or '.[{extra}]' in a"
        " checkout\n"
    )


IMPORTS = [
    ("prometheus_client", "server", "from penstock.server import running"),
    ("pyarrow", "flight", "from penstock.flight.client import FlightStore"),
    (SPARK, "spark", "import penstock.spark"),
    ("opentelemetry", "tracing", "import penstock; penstock.open('rocksdb:.', tracing=True)"),
    ("opentelemetry", "tracing", "import penstock; penstock.Worker('', 'q', print, tracing=True)"),
]


@pytest.mark.parametrize(("modules", "extra", "script"), IMPORTS)
def test_an_import_names_the_extra_that_it_needs(modules: str, extra: str, script: str) -> None:
    caught = f"try:\n {script}\nexcept ImportError as error:\n print(type(error).__name__, error)"
    said = without(modules, "-c", caught).stdout
    assert said.startswith("MissingExtra ")
    assert f"pip install 'penstock[{extra}]'" in said


def test_a_module_of_penstock_that_is_missing_is_no_extra() -> None:
    with pytest.raises(ModuleNotFoundError) as caught, needs_extra("server", "this"):
        import penstock.nothing  # type: ignore[import-not-found]  # noqa: F401, PLC0415
    assert not isinstance(caught.value, MissingExtra)
