"""Settings: what wins, what is refused, what is shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.errors import InvalidInput
from penstock.server.config import FLAGS, LISTENERS, SETTINGS, authenticates, load

ROOT = Path(__file__).parents[2]


def loaded(
    file: Path | None = None, environment: dict[str, str] | None = None, **flags: Any
) -> Any:
    path = None if file is None else str(file)
    return load(file=path, environment=environment or {}, flags=flags)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "penstock.toml"
    path.write_text(
        'store = "rocksdb:./here"\ngrace = "5s"\n'
        '[listen]\nhttp = "127.0.0.1:1"\n[log]\nlevel = "error"\naccess = true\n'
        "[limits]\nconnections = 5\n"
    )
    return path


def test_later_wins(file: Path) -> None:
    environment = {"PENSTOCK_GRACE": "6s", "PENSTOCK_LOG_LEVEL": "debug", "PATH": "/bin"}
    made = loaded(file, environment, log_level="warning", log_life=None)
    config = made.config
    assert config.store == "rocksdb:./here"
    assert config.grace == 6_000
    assert config.log_level == "warning"
    assert config.log_access is True
    assert config.limits_connections == 5
    assert made.sources["store"] == f"file {file}"
    assert made.sources["grace"] == "PENSTOCK_GRACE"
    assert made.sources["log_level"] == "--log-level"
    assert made.sources["log_life"] == "default"


def test_the_file_is_named_by_the_environment_too(file: Path, tmp_path: Path) -> None:
    environment = {"PENSTOCK_CONFIG": str(file)}
    assert loaded(environment=environment).config.grace == 5_000
    other = tmp_path / "other.toml"
    other.write_text("grace = 1\n")
    assert loaded(other, environment).config.grace == 1


def test_every_setting_can_be_set_in_every_way(tmp_path: Path) -> None:
    examples: dict[Any, Any] = {"grace": "7s", "dedup_window": "8s", "account_id": "123456789012"}
    examples |= {
        "drain_delay": "4s",
        "min_free_bytes": "5MB",
        "sqs_region": "eu-west-1",
        "standby_after": "9s",
        "sqs_done_retention": "6s",
        "sqs_purge_interval": "0",
        "ops_address": "127.0.0.1:79",
        "tls_client_listeners": "native",
    }
    for field, setting in SETTINGS.items():
        example = examples.get(field)
        if example is None:
            kinds = {"durability": "relaxed", "routing": "pipeline", "log_level": "debug"}
            kinds |= {"log_format": "json", "auth_mode": "off", "console": "127.0.0.1:78"}
            default = setting.default
            if field in kinds:
                example = kinds[field]
            elif isinstance(default, bool):
                example = not default
            elif field.startswith("limits_") or field == "metrics_queues":
                example = 1234
            elif field.startswith("listen_"):
                example = "127.0.0.1:77"
            else:
                example = "some/text"
        extra: dict[str, Any] = {"tls_certificate": {"tls_key": "k"}}
        extra["tls_key"] = {"tls_certificate": "c"}
        extra["tls_client_ca"] = {"tls_certificate": "c", "tls_key": "k"}
        extra["tls_client_listeners"] = {**extra["tls_client_ca"], "tls_client_ca": "a"}
        beside = extra.get(field, {})
        text = str(example).lower() if isinstance(example, bool) else str(example)
        flags: dict[str, Any] = {**beside, field: example}
        by_flag = loaded(**flags).config
        by_variable = loaded(environment={setting.variable: text}, **beside).config
        section, _, name = setting.path.rpartition(".")
        file = tmp_path / "one.toml"
        value = msgspec.json.encode(example).decode()
        file.write_text(f"[{section}]\n{name} = {value}\n" if section else f"{name} = {value}\n")
        by_file = loaded(file, **beside).config
        assert getattr(by_flag, field) != setting.default, field
        assert getattr(by_flag, field) == getattr(by_variable, field) == getattr(by_file, field)
    assert set(FLAGS) <= set(SETTINGS)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("stores = 'x'", "no setting 'stores'; did you mean store?"),
        ("[listen]\nhtpp = 'x'", r"no setting 'listen.htpp'; did you mean listen.http\?"),
        ("[lissten]\nhttp = 'x'", r"no setting 'lissten.http'; did you mean listen.http\?"),
        ("zzzzzz = 1", "no setting 'zzzzzz'; there are store, durability"),
        ("grace = [1]", r"grace \(from file .*\): it is a duration such as 250ms"),
        ("grace = true", "it is a duration"),
        ("grace = -1", "it is a duration"),
        ("store = 5", "Expected `str`"),
        ("= 5", "is not TOML"),
        ("[log]\nlevel = 'loud'", "it is debug or info or warning or error, not 'loud'"),
        ("[listen]\nhttp = 5", "it is an address such as 127.0.0.1:8815, or off"),
        ("[listen]\nhttp = 'host'", "is not an address such as 127.0.0.1:8815, nor off"),
        ("[listen]\nhttp = ':80'", "is not an address such as"),
        ("[listen]\nhttp = 'a:99999'", "is not an address such as"),
        ("[limits]\nconnections = 0", "Expected `int` >= 1"),
        ("[limits]\nbody = '5 furlongs'", "it is a size such as 64KB"),
        ("account_id = '12'", "account_id .* matching regex"),
        ("[tls]\nkey = 'k'", "go together"),
        ("[tls]\nclient_ca = 'c'", "give tls.certificate too"),
        ("dedup_window = 0", "dedup_window is 1 to"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=match):
        loaded(path)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(InvalidInput, match="can't be read: No such file"):
        loaded(Path("not/here.toml"))


def test_variables_that_are_misspelt_are_errors_and_those_of_others_are_not() -> None:
    for name, near in [
        ("PENSTOCK_STORES", "PENSTOCK_STORE"),
        ("PENSTOCK_GRACEE", "PENSTOCK_GRACE"),
        ("PENSTOCK_LOG_LEVLE", "PENSTOCK_LOG_LEVEL"),
        ("PENSTOCK_LISTEN_SQS", "PENSTOCK_LISTEN_"),
    ]:
        with pytest.raises(InvalidInput, match=f"variable {name}; did you mean {near}"):
            loaded(environment={name: "x"})
    others = ["FLIGHT", "TOKEN", "CA", "SERVER", "SERVICE_HOST", "PORT", "PORT_8815_TCP_ADDR"]
    others += ["HYPOTHESIS_PROFILE", "SERVICE_PORT_HTTP"]
    loaded(environment={f"PENSTOCK_{each}": "x" for each in others})


def test_sizes_and_durations() -> None:
    config = loaded(limits_body="3 MB", grace="2h", limits_idle="1500ms").config
    assert (config.limits_body, config.grace, config.limits_idle) == (3 << 20, 7_200_000, 1_500)


def test_naming_a_listener_turns_the_others_off() -> None:
    def on(**flags: Any) -> list[str]:
        config = loaded(**flags).config
        return [name for name in LISTENERS if getattr(config, f"listen_{name}") != "off"]

    assert on() == ["native", "http", "flight"]
    assert on(listen_flight="127.0.0.1:0") == ["flight"]
    assert on(listen_http="[::1]:5", listen_capnp="localhost:6") == ["http", "capnp"]
    assert on(listen_http="off") == ["native", "flight"]


@pytest.mark.parametrize(
    ("flags", "needs"),
    [
        ({}, False),
        ({"listen_http": "localhost:1", "listen_native": "[::1]:1"}, False),
        ({"auth_keys": "k"}, True),
        ({"auth_keys": "k", "auth_mode": "off"}, False),
        ({"listen_http": "0.0.0.0:1", "auth_keys": "k"}, True),
        ({"listen_http": "0.0.0.0:1", "auth_mode": "off"}, False),
        ({"listen_http": "0.0.0.0:1"}, "listen.http 0.0.0.0:1 can be reached from other"),
        ({"listen_flight": "[::]:1"}, "can be reached from other"),
        ({"listen_native": "broker:1"}, "say --auth off"),
        ({"listen_native": "10.0.0.1:1", "auth_mode": "required"}, "can be reached"),
        ({"auth_mode": "required"}, "auth.mode is required, and there are no keys"),
    ],
)
def test_who_needs_a_key(flags: dict[str, Any], needs: bool | str) -> None:
    config = loaded(**flags).config
    if isinstance(needs, bool):
        assert authenticates(config) is needs
    else:
        with pytest.raises(InvalidInput, match=needs):
            authenticates(config)


# --- the command --------------------------------------------------------------------------------


def penstock(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_command_shows_values_and_sources(file: Path) -> None:
    ended = penstock(
        "config", "--config", str(file), "--no-log-access", "--json", PENSTOCK_GRACE="9s",
        PENSTOCK_STORE="postgresql://me:hunter2@db/x",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    shown = msgspec.json.decode(ended.stdout)
    assert shown["grace"] == {"value": "9s", "source": "PENSTOCK_GRACE"}
    assert shown["log.access"] == {"value": False, "source": "--log-access"}
    assert shown["listen.http"]["source"] == f"file {file}"
    assert shown["store"]["value"] == "postgresql://me:...@db/x"
    assert {setting.path for setting in SETTINGS.values()} == set(shown)
    table = penstock("config", "--grace", "3s")
    assert "3s" in table.stdout
    assert "--grace" in table.stdout


def test_the_command_refuses_what_the_server_would() -> None:
    ended = penstock("config", "--grace", "soon")
    assert ended.returncode == 1
    assert "grace (from --grace): it is a duration such as 250ms, 30s, 5m or 2h" in ended.stderr
    ended = penstock("serve", "--listen", "x")
    assert ended.returncode == 2
    ended = penstock("serve", "--flight", "127.0.0.1:0")
    assert ended.returncode == 1
    assert "which store?" in ended.stderr
    ended = penstock("serve", "--store", "memory:", "--flight", "0.0.0.0:0")
    assert ended.returncode == 1
    assert "penstock keys add NAME --keys FILE --allow all" in ended.stderr
