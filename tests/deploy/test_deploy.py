"""Linters accept the files of ``deploy/``; the metrics, settings and commands in them exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from tests.docs.tables import pipeline_families

import penstock
from penstock.cli.main import cli
from penstock.pipeline.file import read
from penstock.pipeline.supervisor import TAKEN_OVER
from penstock.server import running
from penstock.worker.stats import serve_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
# Kinds of other projects, whose schemas Kubernetes does not have.
FOREIGN_KINDS = {"ScaledObject"}
# Variables of the image's own commands, besides the settings of the server.
CLIENT_VARIABLES = {"PENSTOCK_TOKEN"}


def containers() -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Yield the file, arguments and environment of each container that runs ``penstock``."""
    for path in MANIFESTS:
        for resource in yaml.safe_load_all(path.read_text()):
            template = resource.get("spec", {}).get("template", {}).get("spec", {})
            for container in template.get("containers", []):
                settings = {each["name"]: each.get("value", "") for each in container["env"]}
                yield path.name, container["args"], settings
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for service in services.values():
        if "build" in service:
            yield "compose.yaml", service.get("command", ["serve"]), service.get("environment", {})


def named(node: Any, *kinds: str) -> Iterator[tuple[str, str | None]]:
    """Yield what the references of these kinds in a manifest name: an object, and a key of it."""
    for kind, value in node.items() if isinstance(node, dict) else ():
        if kind in kinds:
            yield value.get("name") or value["secretName"], value.get("key")
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from named(each, *kinds)


def test_another_manifest_or_a_command_sets_what_a_manifest_needs() -> None:
    """Maps of settings, secrets, and the ports that commands connect to."""
    texts = [path.read_text() for path in MANIFESTS]
    parsed = [each for text in texts for each in yaml.safe_load_all(text)]
    maps = {each["metadata"]["name"] for each in parsed if each["kind"] == "ConfigMap"}
    services = {each["metadata"]["name"]: each for each in parsed if each["kind"] == "Service"}
    mounted = {
        volume["configMap"]["name"]
        for each in parsed
        if each["kind"] == "Deployment"
        for volume in each["spec"]["template"]["spec"].get("volumes", [])
        if "configMap" in volume
    }
    assert maps == mounted.union(name for name, _ in named(parsed, "configMapRef"))
    for text in texts:
        made = r"# +kubectl create secret generic (\S+) --from-(?:literal|file)=([a-z.]+)"
        secrets = dict(re.findall(made, text))
        wanted = [*named([*yaml.safe_load_all(text)], "secretKeyRef", "secret")]
        assert {name for name, _ in wanted} == set(secrets)
        assert all(key in {None, secrets[name]} for name, key in wanted)
        for host, port in re.findall(r"(?:grpc|penstock)://([a-z]+):(\d+)", text):
            assert int(port) in {each["port"] for each in services[host]["spec"]["ports"]}


def test_the_servers_of_a_pipeline_leave_the_routing_to_it() -> None:
    """Else its routing fails again and again: the store routes inline."""
    routing, jobs = {}, {"compose.yaml": 0, "kubernetes": 0}
    given = {
        each["metadata"]["name"]: each["data"]
        for path in MANIFESTS
        for each in yaml.safe_load_all(path.read_text())
        if each["kind"] == "ConfigMap"
    }
    for path in MANIFESTS:
        for resource in yaml.safe_load_all(path.read_text()):
            pod = resource.get("spec", {}).get("template", {}).get("spec", {})
            for container in pod.get("containers", []):
                jobs["kubernetes"] += container["args"][:2] == ["pipeline", "run"]
                if container["args"] == ["serve"]:
                    maps = [each["configMapRef"] for each in container.get("envFrom", [])]
                    assert all(each["optional"] for each in maps), "inline without the job"
                    routing[path.name] = {
                        k: v for each in maps for k, v in given[each["name"]].items()
                    }
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    jobs["compose.yaml"] = sum(
        each.get("command", [])[:2] == ["pipeline", "run"] for each in services.values()
    )
    routing["compose.yaml"] = {
        "PENSTOCK_ROUTING": services["server"]["environment"]["PENSTOCK_ROUTING"]
    }
    assert all(jobs.values())
    assert set(routing) == {"rocksdb.yaml", "postgresql.yaml", "compose.yaml"}
    for settings in routing.values():
        assert show_config(settings)["routing"]["value"] == "pipeline"


def pipeline_files() -> Iterator[tuple[str, str]]:
    """Yield the name and text of each file of a pipeline, that of the manifest too."""
    for path in (DEPLOY / "pipeline.toml", DEPLOY / "systemd" / "pipeline.toml"):
        yield path.relative_to(DEPLOY).as_posix(), path.read_text()
    for path in MANIFESTS:
        for resource in yaml.safe_load_all(path.read_text()):
            if "pipeline.toml" in resource.get("data", {}):
                yield path.name, resource["data"]["pipeline.toml"]


def test_the_pipeline_takes_its_files_and_reaches_what_serves_it(tmp_path: Path) -> None:
    found = dict(pipeline_files())
    assert set(found) == {"pipeline.toml", "systemd/pipeline.toml", "pipeline.yaml"}
    for name, text in found.items():
        file = tmp_path / "pipeline.toml"
        file.write_text(text)
        settings, problems = read(file)
        assert settings is not None, (name, problems)
        assert settings.broker.location.endswith(":8815")
        assert settings.route is not None
        assert settings.archive is not None


def test_the_probes_of_the_pipeline_ask_where_its_file_puts_the_pages() -> None:
    manifest = next(path for path in MANIFESTS if path.name == "pipeline.yaml")
    texts = {"pipeline.yaml": manifest.read_text()}
    texts["pipeline.toml"] = (DEPLOY / "compose.yaml").read_text()
    for name, text in pipeline_files():
        found = re.search(r'^address = "0\.0\.0\.0:(\d+)"$', text, re.MULTILINE)
        if name in texts:
            assert found is not None
            assert (
                f":{found[1]}/ready" in texts[name] or f"containerPort: {found[1]}" in texts[name]
            )


def resources() -> Iterator[Any]:
    for path in MANIFESTS:
        for resource in yaml.safe_load_all(path.read_text()):
            yield pytest.param(resource, id=f"{path.stem}-{resource['kind']}")


@pytest.mark.parametrize("resource", [*resources()])
def test_kubernetes_knows_every_field_of_a_manifest(resource: dict[str, Any]) -> None:
    if resource["kind"] not in FOREIGN_KINDS:
        kubernetes_validate.validate(resource, "1.37", strict=True)


def test_hadolint_accepts_the_dockerfile() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    files = [DEPLOY / ".hadolint.yaml", DEPLOY / "Dockerfile"]
    subprocess.run([hadolint, "--config", *files], check=True)


def test_the_image_installs_extras_that_exist() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    extras = ",".join(re.findall(r"\$\{wheel\}\[([a-z,]+)\]", text))
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in project for extra in extras.split(","))


@pytest.mark.parametrize("name", ["penstock.service", "penstock-pipeline.service"])
def test_systemd_accepts_the_unit(tmp_path: Path, name: str) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        reason = "systemd-analyze is not installed (Debian: apt-get install systemd)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    unit = (DEPLOY / "systemd" / name).read_text()
    copy = tmp_path / name
    copy.write_text(unit.replace("/opt/penstock/bin/penstock", "/bin/true"))
    found = subprocess.run([analyze, "verify", copy], check=True, capture_output=True, text=True)
    assert found.stderr == ""


def test_a_pipeline_that_was_taken_over_from_is_not_started_again() -> None:
    unit = (DEPLOY / "systemd" / "penstock-pipeline.service").read_text()
    assert f"\nRestartPreventExitStatus={TAKEN_OVER}\n" in unit


@pytest.mark.parametrize(("file", "arguments", "_settings"), [*containers()])
def test_the_command_line_takes_the_arguments(
    file: str, arguments: list[str], _settings: dict[str, str]
) -> None:
    command: click.Command | None = cli
    rest = list(arguments)
    while isinstance(command, click.Group):
        command = command.get_command(click.Context(command), rest.pop(0))
    assert command is not None
    command.make_context(file, rest)


@pytest.mark.parametrize(("file", "_arguments", "settings"), [*containers()])
def test_the_server_knows_the_variables(
    file: str, _arguments: list[str], settings: dict[str, str]
) -> None:
    variables = {name: value for name, value in settings.items() if name not in CLIENT_VARIABLES}
    sources = {each["source"] for each in show_config(variables).values()}
    assert {name for name, value in variables.items() if value} <= sources, file


def test_the_server_takes_the_file_of_the_unit() -> None:
    shown = show_config({"PENSTOCK_CONFIG": str(DEPLOY / "systemd" / "penstock.toml")})
    assert shown["store"]["value"] == "rocksdb:/var/lib/penstock/data"


def show_config(variables: dict[str, str]) -> dict[str, Any]:
    found = CliRunner().invoke(cli, ["config", "--json"], env=variables)
    assert found.exit_code == 0, found.output
    shown = json.loads(found.stdout)
    assert isinstance(shown, dict)
    return shown


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return all series that a server on RocksDB, a worker and a pipeline export."""
    place = tmp_path_factory.mktemp("deploy")
    settings: dict[str, Any] = {"http": "127.0.0.1:0", "backup_directory": place / "backups"}
    with (
        penstock.open(f"rocksdb:{place / 'data'}") as broker,
        running(broker, **settings) as server,
    ):
        broker.create_queue("orders")
        broker.send("orders", b"1")
        with urllib.request.urlopen(server.location("http") + "/health"):
            pass
        with urllib.request.urlopen(server.location("http") + "/metrics") as page:
            text = page.read().decode()
    worker = penstock.Worker("memory:", "orders", "tests.work.handlers:nothing")
    with (
        serve_metrics(worker.stats, "127.0.0.1", 0) as port,
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page,
    ):
        text += page.read().decode()
    families = re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE)
    for family in pipeline_families():
        total = "_total" if family.type == "counter" else ""
        families.append((f"{family.name}{total}", family.type))
    names = {name for name, kind in families if kind != "histogram"}
    for name, kind in families:
        if kind == "histogram":
            names |= {f"{name}_{part}" for part in ("bucket", "count", "sum")}
    return names


@pytest.mark.parametrize(
    "file", ["prometheus/alerts.yaml", "grafana/penstock.json", "kubernetes/worker.yaml"]
)
def test_the_server_exports_every_metric_that_is_named(file: str, metrics: set[str]) -> None:
    text = (DEPLOY / file).read_text()
    named = set(re.findall(r"\bpenstock_[a-z_]+\b", text))
    assert named
    assert named <= metrics


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((DEPLOY / "grafana" / "penstock.json").read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_every_alert_says_what_to_do() -> None:
    (group,) = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    runbook = (DEPLOY.parent / "docs" / "runbook.md").read_text()
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert f"\n## {rule['alert']}\n" in runbook, f"the runbook says nothing of {rule['alert']}"
