"""The settings of a server: from a file, the environment and flags, in that order.

Each setting is a field of :class:`Config`; its names elsewhere follow from the field's. With the
sections of :data:`SECTIONS`::

    field            file                      environment                flag
    grace            grace = "30s"             PENSTOCK_GRACE             --grace
    tls_key          [tls] key = "…"           PENSTOCK_TLS_KEY           --tls-key
    listen_native    [listen] native = "…"     PENSTOCK_LISTEN_NATIVE     --native  (see FLAGS)
"""

from __future__ import annotations

import difflib
import re
import tomllib
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from penstock import limits
from penstock.errors import InvalidInput, did_you_mean
from penstock.server.security import is_loopback
from penstock.store.sql.location import without_password

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SECTIONS: Final = (
    *("audit", "auth", "backup", "limits", "listen", "log", "metrics", "ops", "sqs", "tls"),
)
LISTENERS: Final = ("native", "http", "flight", "capnp")
TLS_LISTENERS: Final = ("native", "http", "flight", "console")
FLAGS: Final = {
    **{f"listen_{name}": f"--{name}" for name in LISTENERS},
    "auth_mode": "--auth",
    "auth_keys": "--keys",
    "metrics_enabled": "--metrics",
}
ON, OFF = "on", "off"
UNITS_MS: Final = {"": 1, "ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
UNITS_BYTES: Final = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_AMOUNT: Final = re.compile(r"(\d{1,15}) ?([A-Za-z]*)")
# Variables that Kubernetes puts into the environment beside a service of our name.
_FOREIGN_VARIABLE: Final = re.compile(r"PENSTOCK_(SERVICE|PORT)(_.*)?(?<!PORT_FILE)")


class Duration(int):
    """Milliseconds, written as ``250ms``, ``30s``, ``5m``, ``2h``, ``7d`` or a bare number."""

    __slots__ = ()


class Size(int):
    """Bytes, written as ``64KB``, ``16MB`` or a bare number."""

    __slots__ = ()


class Address(str):
    """``HOST:PORT``, or ``off``."""

    __slots__ = ()


class ConsolePlace(str):
    """``on`` (at the HTTP listener), ``off``, or ``HOST:PORT``."""

    __slots__ = ()


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be set about a server, checked; :data:`_ABOUT` describes each field."""

    store: str = ""
    durability: Literal["fsync", "relaxed"] = "fsync"
    routing: Literal["inline", "pipeline", ""] = ""
    dedup_window: Duration = Duration(300_000)
    min_free_bytes: Size | None = None
    standby: bool = False
    standby_after: Duration = Duration(6_000)
    account_id: Annotated[str, Meta(pattern=r"^[0-9]{12}$")] = "000000000000"
    sqs_region: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,32}$")] = "us-east-1"
    sqs_url: str = ""
    sqs_done_retention: Duration = Duration(3_600_000)
    sqs_purge_interval: Duration = Duration(limits.SQS_PURGE_INTERVAL_MS)
    listen_native: Address = Address("127.0.0.1:8814")
    listen_http: Address = Address("127.0.0.1:8816")
    listen_flight: Address = Address("127.0.0.1:8815")
    listen_capnp: Address = Address(OFF)
    capnp_queue: str = "queueber"
    console: ConsolePlace = ConsolePlace("on")
    ops_address: Address = Address(OFF)
    port_file: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    tls_client_listeners: str = ""
    auth_mode: Literal["auto", "off", "required"] = "auto"
    auth_keys: str = ""
    audit_path: str = ""
    backup_directory: str = ""
    drain_delay: Duration = Duration(0)
    grace: Duration = Duration(30_000)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    log_access: bool = False
    log_life: bool = False
    metrics_enabled: bool = True
    metrics_queues: Annotated[int, Meta(ge=0, le=10_000)] = limits.MAX_METRIC_QUEUES
    limits_connections: Annotated[int, Meta(ge=1, le=1_000_000)] = limits.MAX_CONNECTIONS
    limits_body: Size = Size(limits.HTTP_MAX_BODY_BYTES)
    limits_first_byte: Duration = Duration(limits.HTTP_FIRST_BYTE_MS)
    limits_request: Duration = Duration(limits.HTTP_REQUEST_MS)
    limits_idle: Duration = Duration(limits.HTTP_IDLE_MS)

    def addresses(self) -> dict[str, tuple[str, int]]:
        """Return host and port of each listener that is not off."""
        texts = {name: getattr(self, f"listen_{name}") for name in LISTENERS}
        texts["console"] = OFF if self.console == ON else self.console
        texts["ops"] = self.ops_address
        return {name: parse_address(text) for name, text in texts.items() if text != OFF}


_ABOUT: Final = {
    "store": "The store, such as rocksdb:./data; made if it is not there.",
    "durability": "When a verb returns: relaxed waits for no disk.",
    "routing": "Routing of a new store; an existing one that routes the other way is refused.",
    "dedup_window": "How long a dedup id is remembered.",
    "min_free_bytes": "Bytes that new messages leave free on the disk of a RocksDB store.",
    "standby": "Wait until a store on object storage has no owner, then take it over.",
    "standby_after": "How long the owner gives no sign of life before it is taken for gone.",
    "account_id": "The account in the ARNs and URLs of SQS queues.",
    "sqs_region": "The region in the ARNs of SQS queues.",
    "sqs_url": "Beginning of SQS queue URLs; empty: the address that a request came to.",
    "sqs_done_retention": "How long queues that are made over SQS remember deleted messages.",
    "sqs_purge_interval": "Least time between two purges of a queue over SQS; 0: none.",
    "listen_native": "Where to serve native clients.",
    "listen_http": "Where to serve SQS, /metrics, /health, /ready and /admin.",
    "listen_flight": "Where to serve Arrow Flight.",
    "listen_capnp": "Where to serve Queueber's clients.",
    "capnp_queue": "The queue that Queueber's clients use; made if it is not there.",
    "console": "Where the web console is: on (at the HTTP listener), off, or at its own address.",
    "ops_address": "Where /health, /ready and /metrics need no TLS and no key; HTTP has them too.",
    "port_file": "A file that gets the port, or a line NAME PORT for each listener.",
    "tls_certificate": "The server's certificate chain, PEM.",
    "tls_key": "The certificate's private key, PEM.",
    "tls_client_ca": "Certificate authority of the clients' certificates: mutual TLS.",
    "tls_client_listeners": "Listeners that ask for them, such as native,flight; empty: all.",
    "auth_mode": "Who needs a key; auto: everybody, unless only this machine can connect.",
    "auth_keys": "The keys file; 'penstock keys' writes it.",
    "audit_path": "A file for the record of who changed queues; log: the server's log.",
    "backup_directory": "Where 'penstock backup' has a server write: a path, or s3://BUCKET/PREFIX.",
    "drain_delay": "How long a stopping server goes on serving while /ready is 503.",
    "grace": "How long a stopping server waits for requests at work.",
    "log_level": "Lowest level that is logged.",
    "log_format": "Format of a log line.",
    "log_access": "Log every request at info; at debug if off.",
    "log_life": "Log every step of messages, from publish to their removal.",
    "metrics_enabled": "Serve /metrics.",
    "metrics_queues": "Queues with series of their own.",
    "limits_connections": "Connections of all listeners together.",
    "limits_body": "Largest body of an HTTP request, in bytes.",
    "limits_first_byte": "Time until the first byte of a connection.",
    "limits_request": "Time for an HTTP request to come in whole.",
    "limits_idle": "Time that a connection may be silent.",
}


class Setting(NamedTuple):
    """A setting and its names."""

    field: str
    path: str
    variable: str
    flag: str
    kind: Any
    default: Any
    about: str


def _setting(field: str, kind: Any, default: Any) -> Setting:
    section, _, rest = field.partition("_")
    path = f"{section}.{rest}" if section in SECTIONS else field
    flag = FLAGS.get(field, f"--{field.replace('_', '-')}")
    # Annotated in any case, so that readers of a kind need not tell the two apart.
    kind = kind if typing.get_origin(kind) is Annotated else Annotated[kind, Meta()]
    return Setting(field, path, f"PENSTOCK_{field.upper()}", flag, kind, default, _ABOUT[field])


SETTINGS: Final = {
    info.name: _setting(info.name, kind, info.default)
    for info, kind in zip(
        msgspec.structs.fields(Config),
        typing.get_type_hints(Config, include_extras=True).values(),
        strict=True,
    )
}


class SettingValue(NamedTuple):
    """A value and where it came from."""

    value: Any
    source: str


class LoadedConfig(NamedTuple):
    """The outcome: the settings, and the source of each by its field."""

    config: Config
    sources: dict[str, str]

    def texts(self) -> dict[str, SettingValue]:
        """Give every setting by its path, as text that is fit to be seen."""
        return {
            setting.path: SettingValue(_shown(getattr(self.config, field)), self.sources[field])
            for field, setting in SETTINGS.items()
        }


def load(
    *, file: str | None = None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> LoadedConfig:
    """Put the settings together; later wins: defaults, file, environment, flags.

    ``flags`` are by field; those that are None were not given. ``file`` None means the one that
    PENSTOCK_CONFIG names, if any.
    """
    raw: dict[str, SettingValue] = {}
    file = file or environment.get("PENSTOCK_CONFIG") or None
    if file is not None:
        raw |= _from_file(Path(file))
    raw |= _from_environment(environment)
    for field, value in flags.items():
        if value is not None:
            raw[field] = SettingValue(value, SETTINGS[field].flag)
    values = {field: _convert(SETTINGS[field], *sourced) for field, sourced in raw.items()}
    sources = dict.fromkeys(SETTINGS, "default") | {
        field: sourced.source for field, sourced in raw.items()
    }
    # Naming one listener turns the others off: another process may have their default ports.
    fields = [f"listen_{name}" for name in LISTENERS]
    if any(field in raw and raw[field].value != OFF for field in fields):
        for field in fields:
            if field not in raw:
                values[field], sources[field] = OFF, "default, as others are named"
    config = Config(**values)
    _check(config)
    return LoadedConfig(config, sources)


def _from_file(path: Path) -> dict[str, SettingValue]:
    try:
        with path.open("rb") as file:
            tree = tomllib.load(file)
    except OSError as error:
        raise InvalidInput(f"the file {path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the file {path} is not TOML: {error}") from None
    # The command line's own section.
    tree.pop("client", None)
    by_path = {setting.path: setting.field for setting in SETTINGS.values()}
    found = {}
    for name, value in tree.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for rest, each in inner:
            full = f"{name}.{rest}" if rest else name
            if full not in by_path:
                raise InvalidInput(f"{path}: no setting {full!r:.100}{_nearest(full, by_path)}")
            found[by_path[full]] = SettingValue(each, f"file {path}")
    return found


def _from_environment(environment: Mapping[str, str]) -> dict[str, SettingValue]:
    by_variable = {setting.variable: setting.field for setting in SETTINGS.values()}
    found = {}
    for name, value in environment.items():
        if name in by_variable:
            found[by_variable[name]] = SettingValue(value, name)
        elif name.startswith("PENSTOCK_") and name != "PENSTOCK_CONFIG":
            _refuse_misspelt(name, by_variable)
    return found


def _refuse_misspelt(name: str, known: Mapping[str, str]) -> None:
    """Refuse a variable that is meant for us; others have theirs beside ours."""
    if _FOREIGN_VARIABLE.fullmatch(name):
        return
    rest = name.removeprefix("PENSTOCK_")
    bare = [each.removeprefix("PENSTOCK_") for each in known]
    sections = tuple(f"{section.upper()}_" for section in SECTIONS)
    if rest.startswith(sections) or difflib.get_close_matches(rest, bare, 1, 0.8):
        raise InvalidInput(f"no setting is named by the variable {name}{_nearest(name, known)}")


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"


def _convert(setting: Setting, value: Any, source: str) -> Any:
    """Check a value, which is text if it came from the environment."""
    try:
        return msgspec.convert(value, setting.kind, strict=False, dec_hook=_special)
    except msgspec.ValidationError as error:
        text = str(error)
        choices = typing.get_args(setting.kind)[0]
        if typing.get_origin(choices) is Literal:
            text = f"it is {' or '.join(each for each in typing.get_args(choices) if each)}"
        shown = "" if repr(value) in text else f", not {value!r:.100}"
        raise InvalidInput(f"{setting.path} (from {source}): {text}{shown}") from None


def _special(kind: type, value: Any) -> Any:
    if kind is Duration:
        return Duration(amount(value, UNITS_MS, "a duration such as 250ms, 30s, 5m or 2h"))
    if kind is Size:
        return Size(amount(value, UNITS_BYTES, "a size such as 64KB or 16MB"))
    choices = [ON, OFF] if kind is ConsolePlace else [OFF]
    if not isinstance(value, str):
        words = " or ".join(choices)
        raise ValueError(f"it is an address such as 127.0.0.1:8815, or {words}")  # noqa: TRY004
    if value not in choices:
        parse_address(value, choices)
    return kind(value)


def amount(value: Any, units: Mapping[str, int], what: str) -> int:
    """Return a number with its unit as one of the smallest unit; ValueError says what it is."""
    found = _AMOUNT.fullmatch(str(value)) if isinstance(value, int | str) else None
    if found is None or found[2] not in units:
        raise ValueError(f"it is {what}")
    return int(found[1]) * units[found[2]]


def parse_address(text: str, choices: Sequence[str] = (OFF,)) -> tuple[str, int]:
    """Split ``HOST:PORT``; an IPv6 host may be in brackets. Other choices are for the error."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65_535:
        words = " nor ".join(choices)
        raise InvalidInput(f"{text!r:.100} is not an address such as 127.0.0.1:8815, nor {words}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _check(config: Config) -> None:
    """Refuse settings that contradict each other."""
    if bool(config.tls_certificate) != bool(config.tls_key):
        raise InvalidInput("tls.certificate and tls.key go together: give both or neither")
    if config.tls_client_ca and not config.tls_certificate:
        raise InvalidInput("tls.client_ca asks clients for certificates: give tls.certificate too")
    chosen = [each for each in config.tls_client_listeners.split(",") if each]
    for unknown in set(chosen) - {*TLS_LISTENERS}:
        hint = did_you_mean(unknown, TLS_LISTENERS)
        raise InvalidInput(f"tls.client_listeners: no listener {unknown!r:.100} has TLS; {hint}")
    if chosen and not config.tls_client_ca:
        raise InvalidInput("tls.client_listeners ask for certificates: give tls.client_ca too")
    if not 1 <= config.dedup_window <= limits.MAX_DEDUP_WINDOW_MS:
        raise InvalidInput(f"dedup_window is 1 to {limits.MAX_DEDUP_WINDOW_MS} ms")
    if config.standby_after < limits.MIN_STANDBY_AFTER_MS:
        raise InvalidInput(
            f"standby_after is at least {limits.MIN_STANDBY_AFTER_MS} ms: an owner with nothing "
            f"else to write gives a sign of life every {limits.HEARTBEAT_MS} ms"
        )


def authenticates(config: Config) -> bool:
    """Decide whether requests need a key; refuse to be open to others by accident."""
    if config.auth_mode == "off":
        return False
    if config.auth_keys:
        if config.listen_capnp != OFF:
            raise InvalidInput(
                "Queueber's clients know no login: set listen.capnp to off, or auth.mode to off"
            )
        return True
    no_keys = (
        "and there are no keys: make one with 'penstock keys add NAME --keys FILE --allow all' and "
        "name the file with --keys FILE"
    )
    for name, (host, _) in config.addresses().items():
        # The pages for operations are meant for everybody who can connect.
        if name != "ops" and not is_loopback(host):
            field = name if name == "console" else f"listen_{name}"
            raise InvalidInput(
                f"{SETTINGS[field].path} {getattr(config, field)} can be reached from other "
                f"machines, {no_keys}; or listen on 127.0.0.1; or, if everybody may do everything, "
                "say --auth off"
            )
    if config.auth_mode == "required":
        raise InvalidInput(f"auth.mode is required, {no_keys}")
    return False


def tls_files(config: Config, listener: str) -> tuple[Path, Path, Path | None] | None:
    """Return the files of certificate, key and the clients' CA; None: there is no certificate.

    There is no CA where a listener does not ask clients for certificates.
    """
    if not config.tls_certificate:
        return None
    asked = config.tls_client_listeners
    asks = not asked or listener in asked.split(",")
    ca = Path(config.tls_client_ca) if config.tls_client_ca and asks else None
    return Path(config.tls_certificate), Path(config.tls_key), ca


def _shown(value: Any) -> Any:
    if isinstance(value, Duration):
        return f"{value}ms" if value % 1_000 or not value else f"{value // 1_000}s"
    if isinstance(value, Size):
        return int(value)
    if value is None:
        return ""
    if isinstance(value, str):
        return without_password(value)
    return value
