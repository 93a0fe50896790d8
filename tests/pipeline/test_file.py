"""The file of a pipeline: what it may say, and a line for each thing that is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

pytest.importorskip("pyarrow", reason="pyarrow is not installed")

from penstock.cli.main import cli
from penstock.pipeline.file import Settings, lacking, read, texts

if TYPE_CHECKING:
    from pathlib import Path

WHOLE = """
[broker]
location = "grpc://a:8815,b"
token_file = "token"
[spark]
master = "local[2]"
quick = true
[spark.conf]
"spark.driver.memory" = "2g"
"spark.sql.shuffle.partitions" = 8
"spark.ui.enabled" = true
[operations]
address = "0.0.0.0:8818"
[log]
format = "json"
[route]
checkpoint = "s3a://bucket/route"
max_offsets = 50_000
steps = "shop:enrich"
payload = true
[archive]
place = "s3://bucket/lake"
keep = "7d"
every = "90s"
queues = ["orders"]
states = ["done"]
payload = false
trim = false
[optimize]
at = "03:30"
[vacuum]
every = "14d"
retention = "10d"
[report]
place = "reports"
every = "6h"
keep = 3
"""


def problems_of(path: Path, text: str, *, whole: bool = False) -> list[str]:
    """Read a file; without ``whole`` one that is complete but for the text."""
    rest = "" if whole else '\n[broker]\nlocation = "grpc://127.0.0.1"\n'
    if not whole and "[route]" not in text:
        rest += '[route]\ncheckpoint = "checkpoint"\n'
    file = path / "pipeline.toml"
    file.write_text(text + rest)
    settings, problems = read(file)
    assert (settings is None) == bool(problems)
    return [each.removeprefix(f"{file}: ") for each in problems]


def test_a_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text(WHOLE)
    settings, problems = read(file)
    assert problems == []
    assert isinstance(settings, Settings)
    shown = {name: dict(keys) for name, keys in texts(settings).items()}
    assert shown["route"] == {
        "checkpoint": "s3a://bucket/route",
        "max_offsets": "50000",
        "steps": "shop:enrich",
        "payload": "true",
    }
    assert shown["archive"]["every"] == "90s"
    assert shown["archive"]["keep"] == "7d"
    assert shown["optimize"] == {"every": "1d", "at": "03:30"}
    assert shown["vacuum"] == {"every": "14d", "at": "00:00", "retention": "10d"}
    # Names begin at the directory of the file.
    assert shown["report"]["place"] == str(tmp_path / "reports")
    assert shown["broker"]["token_file"] == str(tmp_path / "token")
    assert shown["spark"]["conf"].startswith("spark.driver.memory=2g, ")


def test_the_command_line_counts_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text('[route]\ncheckpoint = "checkpoint"\n')
    assert "[broker] location: it is missing" in read(file).problems[0]
    found = read(file, location="grpc://other", address="off").settings
    assert found is not None
    assert (found.broker.location, found.operations.address) == ("grpc://other", "off")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[rout]\n", "[rout]: there is no such section; did you mean 'route'?"),
        ("report = 5\n", "[report]: it is a section, not 5"),
        ("[archive]\nplace = 'a'\nkep = '1d'\n",
         "[archive] kep: there is no such key; did you mean 'keep'?"),
        ("[archive]\n",
         "[archive] place: it is missing: the name of a directory"),
        ("[archive]\nplace = 'a'\nkeep = '7 weeks'\n",
         "[archive] keep: it is a duration such as 30s, 5m, 12h or 7d, not '7 weeks'"),
        ("[archive]\nplace = 'a'\nevery = 2.5\n",
         "[archive] every: it is a duration such as 30s, 5m, 12h or 7d, not 2.5"),
        # A bare number is milliseconds.
        ("[archive]\nplace = 'a'\nevery = 30\n", "[archive] every: it is at least 1s, not 30ms"),
        ("[archive]\nplace = 7\n",
         "[archive] place: it is the name of a directory, or a URL where"),
        ("[archive]\nplace = ''\n",
         "[archive] place: it is the name of a directory, or a URL where"),
        ("[archive]\nplace = 'gs://bucket/a'\n",
         "[archive] place: it is a directory or s3://BUCKET/PREFIX, not gs://bucket/a"),
        ("[archive]\nplace = 'a'\nstates = ['done', 'dead']\n",
         "[archive] states: it is a list: 'done' or 'failed' …, not ['done', 'dead']"),
        ("[archive]\nplace = 'a'\nstates = []\n",
         "[archive] states: it is a list of 'done' or 'failed', and is empty"),
        ("[archive]\nplace = 'a'\nqueues = 'orders'\n",
         "[archive] queues: it is a list: a text …, not 'orders'"),
        ("[archive]\nplace = 'a'\ntrim = 'yes'\n", "[archive] trim: it is true or false"),
        ("[optimize]\n",
         "[optimize]: it is about the archive, and there is no section [archive]"),
        ("[archive]\nplace = 'a'\n[vacuum]\nretention = '3d'\n",
         "[vacuum] retention: it is at least 7d, not 72h"),
        ("[archive]\nplace = 'a'\n[optimize]\nat = '3:30'\n",
         '[optimize] at: it is a time of day in UTC such as "03:30", not \'3:30\''),
        ("[report]\nplace = 's3://bucket/a'\n",
         "[report] place: it is a directory, not s3://bucket/a"),
        ("[report]\nplace = 'a'\nkeep = 0\n", "[report] keep: it is a number from 1, not 0"),
        ("[route]\ncheckpoint = 'a'\nmax_offsets = '9'\n",
         "[route] max_offsets: it is a number from 1, not '9'"),
        ("[route]\ncheckpoint = 'a'\nsteps = 'enrich'\n",
         "[route] steps: it is a function such as shop.pipeline:enrich, not 'enrich'"),
        ("[spark]\nmaster = 'lokal'\n",
         "[spark] master: it is a master such as local[2], spark://HOST:PORT, sc://"),
        ("[spark]\nquick = 1\n", "[spark] quick: it is true or false, not 1"),
        ("[spark.conf]\nmemory = '2g'\n", "[spark.conf] memory: a setting of Spark begins with"),
        ("[spark.conf]\nspark.driver.memory = '2g'\n",
         "[spark] conf: it is a section of texts, numbers, true and false, not {'spark': {"),
        ("[operations]\naddress = '8818'\n",
         "[operations] address: '8818' is not an address such as 127.0.0.1:8815, nor off"),
        ("[log]\nlevel = 'loud'\n",
         "[log] level: it is 'debug' or 'info' or 'warning' or 'error', not 'loud'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_what_would_be_right(
    tmp_path: Path, text: str, expected: str
) -> None:
    (problem,) = problems_of(tmp_path, text)
    assert problem.startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "there is nothing to run: give one of the sections route, archive, optimize, vacuum"),
        ("[broker\n", "the file is not TOML: "),
        ("[broker]\ntoken = 'ops:SECRET'\n[route]\ncheckpoint = 'a'\n",
         "[broker] token: a secret has no place in this file: set PENSTOCK_TOKEN"),
        ("[broker]\nlocation = 'penstock://a:8814'\n[route]\ncheckpoint = 'a'\n",
         "[broker] location: 'penstock://a:8814' names no server; the URL of a server is grpc://"),
    ],
)  # fmt: skip
def test_files_that_are_no_pipeline(tmp_path: Path, text: str, expected: str) -> None:
    assert any(each.startswith(expected) for each in problems_of(tmp_path, text, whole=True))


def test_everything_is_told_at_once(tmp_path: Path) -> None:
    found = problems_of(tmp_path, "[rout]\n[archive]\nevery = 'x'\n[vacuum]\nretention = '1d'\n")
    assert [each.partition(":")[0] for each in found] == [
        "[rout]",
        "[archive] every",
        "[archive] place",
        "[vacuum] retention",
    ]


# --- this machine ---------------------------------------------------------------------------------


def lacking_of(path: Path, text: str) -> list[str]:
    file = path / "pipeline.toml"
    file.write_text(text)
    settings, problems = read(file, location="grpc://127.0.0.1")
    assert settings is not None, problems
    return [each.removeprefix(f"{file}: ") for each in lacking(file, settings)]


def test_what_a_machine_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    (tmp_path / "file").write_text("")
    (tmp_path / "steps_that_fail.py").write_text("import nothing_like_it\n")
    (tmp_path / "steps_without.py").write_text("enrich = 5\n")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    route = "[route]\ncheckpoint = '{}'\nsteps = '{}'\n"
    why = "ModuleNotFoundError: No module named 'nothing_like_it'"
    assert lacking_of(tmp_path, route.format("none/at/all", "steps_that_fail:enrich")) == [
        "Spark needs Java 17 or 21: 'penstock doctor --need spark' says what is missing",
        f"[route] checkpoint: there is no directory {tmp_path}/none/at: make it, or name another",
        f"[route] steps: module steps_that_fail can't be imported: {why}",
    ]
    found = lacking_of(tmp_path, route.format("file", "steps_without:enrich"))[1:]
    assert found == [
        f"[route] checkpoint: {tmp_path}/file is a file: name a directory",
        "[route] steps: module steps_without has no function enrich",
    ]
    found = lacking_of(tmp_path, route.format("a", "absent_module:f") + "[broker]\nca = 'x.pem'\n")
    assert found[1:] == [
        f"[broker] ca: {tmp_path}/x.pem can't be read: No such file or directory",
        f"[route] steps: module absent_module can't be imported: it is not in {tmp_path}",
    ]


def test_the_command_tells_all_and_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text("[rout]\n[log]\nlevel = 'loud'\n")
    for words in (["check", str(file)], ["run", str(file)], ["run", "--check", str(file)]):
        found = CliRunner().invoke(cli, ["pipeline", *words])
        assert found.exit_code == 1
        lines = found.stderr.splitlines()
        assert all(each.startswith(f"Error: {file}: ") for each in lines)
        assert [each.split(": ")[2] for each in lines[:2]] == ["[rout]", "[log] level"]
    missing = CliRunner().invoke(cli, ["pipeline", "check", str(tmp_path / "none.toml")])
    expected = f"Error: {tmp_path}/none.toml: the file can't be read: No such file or directory\n"
    assert (missing.exit_code, missing.stderr) == (1, expected)
    file.write_text('[broker]\nlocation = "grpc://a"\n[route]\ncheckpoint = "a"\n')
    shown = CliRunner().invoke(cli, ["pipeline", "check", str(file), "--json"])
    assert shown.exit_code == 0, shown.output
    assert '"checkpoint"' in shown.stdout
