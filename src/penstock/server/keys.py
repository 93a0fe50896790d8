"""The keys of a server: the file that has them, and whose a token is.

A key has an id, a secret that was shown once when it was made, and permissions. Native clients,
Flight and Cap'n Proto present ``ID:SECRET`` as a token, of which the file holds a salted hash. SQS
clients sign with the secret instead, and checking a signature takes the secret itself: it is in
the file only for keys that were made for SQS.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import hmac
import logging
import os
import re
import ssl
import stat
import threading
import tomllib
from asyncio import get_running_loop
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec

from penstock import limits
from penstock.clock import SystemClock
from penstock.errors import InvalidInput
from penstock.server.security import ACTIONS, Principal, Rate

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Iterator
    from pathlib import Path

log = logging.getLogger(__name__)

RATES: Final = ("messages_per_second", "bytes_per_second")
_KEY_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PATTERN: Final = re.compile(r"[A-Za-z0-9._*-]{1,80}")
# A secret has 240 random bits: the cost need not make up for a weak one, and a stranger that sends
# wrong tokens must not keep the loop busy.
_SCRYPT: Final = (512, 8, 1)
_SECRET_BYTES: Final = 30
_PRIVATE_MODES: Final = stat.S_IRWXO | stat.S_IWGRP


class Secret(NamedTuple):
    """A secret as the file has it: its hash, or itself if SQS needs it."""

    hash: str
    plain: str


class Key(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key as the file has it. ``hash`` is ``scrypt:N:R:P:SALT:DIGEST``, in base64.

    While its secret is being replaced it has two: ``former_hash`` or ``former_secret`` is good too.
    """

    permissions: list[str]
    hash: str = ""
    secret: str = ""
    former_hash: str = ""
    former_secret: str = ""
    description: str = ""
    messages_per_second: Annotated[int, msgspec.Meta(ge=0)] = 0
    bytes_per_second: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def secrets(self) -> list[Secret]:
        """The secrets that are good, the newest first."""
        former = Secret(self.former_hash, self.former_secret)
        return [Secret(self.hash, self.secret), *([former] if any(former) else [])]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: dict[str, Key] = {}


class Keys:
    """The keys of a file, for lookups from any thread; a file that changes is read again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._digest_key = ssl.RAND_bytes(32)
        # Hashes are compared here, one at a time however many clients log in by wrong tokens.
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="penstock-login")
        self._seen = _fingerprint(path)
        self._keys: dict[str, Key] = {}
        # Each secret has its own: connections made by one that is taken away end with it.
        self._principals: dict[tuple[str, Secret], Principal] = {}
        # The tokens that are known to be right, by a keyed digest, so that neither the map nor the
        # time that a comparison takes says anything about them.
        self._digests: dict[tuple[str, Secret], bytes] = {}
        # By key with two secrets: the second at which the former one was last used, or 0.
        self.former_used: dict[str, int] = {}
        self._adopt(read_keys(path))

    def _adopt(self, keys: dict[str, Key]) -> None:
        with self._lock:
            principals: dict[tuple[str, Secret], Principal] = {}
            rates = {key_id: found.rate for (key_id, _), found in self._principals.items()}
            for key_id, key in keys.items():
                rate = _rate_of(key, rates.get(key_id))
                for number, secret in enumerate(key.secrets):
                    found = self._principals.pop((key_id, secret), None) or Principal(key_id)
                    found.grants = _grants(key_id, key.permissions)
                    found.former, found.rate = number > 0, rate
                    principals[key_id, secret] = found
            two = [key_id for key_id, key in keys.items() if len(key.secrets) > 1]
            self.former_used = {each: self.former_used.get(each, 0) for each in two}
            for gone in self._principals.values():
                gone.grants = ()
            self._digests = {each: self._digest_of(each) for each in principals}
            self._keys, self._principals = keys, principals

    def __len__(self) -> int:
        return len(self._keys)

    def reload(self) -> bool:
        """Read the file again; one that can't be used, or is empty, leaves the keys as they are."""
        self._seen = _fingerprint(self.path)
        try:
            keys = read_keys(self.path)
            # So an editor leaves it for a moment, and clients whose key is gone don't come back.
            if self._keys and not keys:
                raise InvalidInput(f"the keys file {self.path} has none any more")  # noqa: TRY301
        except InvalidInput as error:
            log.error("the keys stay as they were: %s", error)  # noqa: TRY400
            return False
        self._adopt(keys)
        log.info("read %d keys from %s", len(keys), self.path)
        return True

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        if _fingerprint(self.path) != self._seen:
            self.reload()

    def by_token(self, token: str) -> Principal | None:
        """Return whose token (``ID:SECRET``) this is, or None; waits for its hash if it is new."""
        found, wanted = self._look_up(token)
        return self._checker.submit(self._check, token).result() if wanted else found

    def find(self, token: str) -> Principal | Future[Principal | None] | None:
        """Do the same on an event loop, which must not wait: of a new token it gives a future."""
        found, wanted = self._look_up(token)
        if not wanted:
            return found
        return get_running_loop().run_in_executor(self._checker, self._check, token)

    def _look_up(self, token: str) -> tuple[Principal | None, list[Secret]]:
        """Return whose token this is known to be, and the secrets that it may be by their hash."""
        if len(token) > limits.MAX_TOKEN_CHARS:
            return None, []
        key_id = token.partition(":")[0]
        digest = self._digest(token)
        unknown = []
        with self._lock:
            key = self._keys.get(key_id)
            for secret in [] if key is None else key.secrets:
                known = self._digests[key_id, secret]
                if hmac.compare_digest(known, digest):
                    principal = self._principals[key_id, secret]
                    self.note_use(principal)
                    return principal, []
                if not known:
                    unknown.append(secret)
        return None, unknown

    def _check(self, token: str) -> Principal | None:
        """Compare the hashes of a token's key; a secret that it is is known by its digest then."""
        # Of many logins at a time the first may have told.
        found, secrets = self._look_up(token)
        key_id, _, given = token.partition(":")
        secret = next((each for each in secrets if _matches(each, given)), None)
        if secret is None:
            return found
        with self._lock:
            # The file may have been read again meanwhile, and the key be gone or another.
            principal = self._principals.get((key_id, secret))
            if principal is not None:
                self._digests[key_id, secret] = self._digest(token)
                self.note_use(principal)
            return principal

    def _digest(self, token: str) -> bytes:
        encoded = token.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(encoded, key=self._digest_key, digest_size=32).digest()

    def _digest_of(self, of: tuple[str, Secret]) -> bytes:
        """Return the digest of a secret's token, as far as it is known."""
        key_id, secret = of
        return (
            self._digest(f"{key_id}:{secret.plain}") if secret.plain else self._digests.get(of, b"")
        )

    def note_use(self, principal: Principal) -> None:
        """Note when a secret was used that a newer one is to replace."""
        if principal.former and principal.key_id in self.former_used:
            self.former_used[principal.key_id] = SystemClock().now_ms() // 1000

    def secrets_of(self, key_id: str) -> list[tuple[str, Principal]]:
        """Return the secrets of a key that was made for SQS, for checking a signature."""
        with self._lock:
            key = self._keys.get(key_id)
            plain = [] if key is None else [each for each in key.secrets if each.plain]
            return [(each.plain, self._principals[key_id, each]) for each in plain]

    def keeps_no_secret(self, key_id: str) -> bool:
        """Whether this is a key that was not made for SQS."""
        key = self._keys.get(key_id)
        return key is not None and not key.secret


def _rate_of(key: Key, known: Rate | None) -> Rate | None:
    """Return the rate that all secrets of a key share; a known one keeps what was used of it."""
    wanted = rates_of(key)
    if known is None or tuple(known.limits.values()) != wanted:
        return Rate(*wanted) if any(wanted) else None
    return known


def rates_of(key: Key) -> tuple[int, int]:
    """Return how fast a key may publish: messages and bytes a second, 0: no limit."""
    return key.messages_per_second, key.bytes_per_second


def _fingerprint(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _matches(secret: Secret, given: str) -> bool:
    _, n, r, p, salt, wanted = secret.hash.split(":")
    made = _scrypt(given, base64.b64decode(salt), (int(n), int(r), int(p)))
    return hmac.compare_digest(base64.b64decode(wanted), made)


def _scrypt(secret: str, salt: bytes, cost: tuple[int, int, int]) -> bytes:
    n, r, p = cost
    encoded = secret.encode("utf-8", "surrogatepass")
    return hashlib.scrypt(encoded, salt=salt, n=n, r=r, p=p, dklen=32)


def _grants(key_id: str, permissions: list[str]) -> tuple[tuple[str, str], ...]:
    grants: list[tuple[str, str]] = []
    for text in permissions:
        action, _, pattern = text.partition(":")
        pattern = pattern or "*"
        if action not in {*ACTIONS, "all"} or not _PATTERN.fullmatch(pattern):
            raise InvalidInput(
                f"key {key_id!r}: {text!r:.100} is not a permission such as publish:orders-*, "
                f"consume:* or admin:*; actions are {', '.join(ACTIONS)} and all"
            )
        grants += [(each, pattern) for each in (ACTIONS if action == "all" else (action,))]
    return tuple(grants)


# --- the file -----------------------------------------------------------------------------------


def read_keys(path: Path) -> dict[str, Key]:
    """Read a keys file; other users must not be able to."""
    try:
        mode = path.stat().st_mode
        body = path.read_bytes()
    except OSError as error:
        raise InvalidInput(
            f"the keys file {path} can't be read: {error.strerror}; "
            f"'penstock keys add --keys {path} NAME --allow all' makes one"
        ) from None
    if mode & _PRIVATE_MODES:
        raise InvalidInput(
            f"the keys file {path} is open to others (mode {stat.S_IMODE(mode):04o}): "
            f"chmod 600 {path}"
        )
    try:
        keys = msgspec.convert(tomllib.loads(body.decode()), _File).keys
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        # The text of a parser's error may quote what it stumbled over: say where, not what.
        where = str(error) if isinstance(error, msgspec.ValidationError) else _place(error)
        raise InvalidInput(f"the keys file {path} can't be used: {where}") from None
    for key_id, key in keys.items():
        _check_key(path, key_id, key)
    return keys


def _place(error: Exception) -> str:
    found = re.search(r"\(at .*\)$", str(error))
    return f"it is not well-formed {found[0]}" if found else "it is not well-formed"


def _check_key(path: Path, key_id: str, key: Key) -> None:
    if not _KEY_ID.fullmatch(key_id):
        raise InvalidInput(f"{key_id!r:.100} is not a key's id: up to 64 of A-Z a-z 0-9 _ . -")
    _grants(key_id, key.permissions)
    for secret in key.secrets:
        if secret.plain:
            continue
        parts = secret.hash.split(":")
        try:
            _, n, r, p, salt, digest = parts
            cost = int(n) * int(r) * int(p)
            sizes = len(base64.b64decode(salt)), len(base64.b64decode(digest))
        except (ValueError, binascii.Error):
            cost, sizes = 0, (0, 0)
        # Bounded, since a file with an absurd cost would stop the server at the first login.
        if parts[0] != "scrypt" or not 0 < cost <= 1 << 17 or min(sizes) < 16:
            raise InvalidInput(
                f"key {key_id!r} of {path} has neither a secret nor a hash that can be used: make "
                "it anew with 'penstock keys add'"
            )


def write_keys(path: Path, keys: dict[str, Key]) -> None:
    """Replace a keys file whole: a new one is its owner's alone, another keeps group and mode."""
    body = "\n".join(_toml(key_id, key) for key_id, key in keys.items()).encode()
    # One name for all processes, so that the next takes away what a crash has left.
    partial = path.with_name(f".{path.name}.part")
    try:
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            if path.exists():
                # The server may be another user, who reads it as one of its group.
                before = path.stat()
                os.fchown(descriptor, before.st_uid, before.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
            file.write(body)
            file.flush()
            os.fsync(descriptor)
        partial.replace(path)
    except OSError as error:
        # It has secrets.
        with suppress(OSError):
            partial.unlink()
        raise InvalidInput(f"the keys file {path} can't be written: {error.strerror}") from None


@contextmanager
def _changing(path: Path) -> Iterator[dict[str, Key]]:
    """Give the keys of a file to a block that changes them; processes do so one after the other."""
    lock = path.with_name(f".{path.name}.lock")
    try:
        # Another user may change the file later, who need not be able to write this one.
        descriptor = os.open(lock, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InvalidInput(
            f"the keys file {path} can't be changed: {lock} can't be opened: {error.strerror}"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        keys = read_keys(path) if path.exists() else {}
        yield keys
        write_keys(path, keys)
    finally:
        os.close(descriptor)


def _toml(key_id: str, key: Key) -> str:
    # Values are printable text, which JSON and TOML quote alike.
    values = msgspec.to_builtins(key)
    lines = [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in values.items()]
    return "\n".join([f'[keys."{key_id}"]', *lines, ""])


def add_key(
    path: Path,
    key_id: str,
    permissions: list[str],
    *,
    sqs: bool = False,
    description: str = "",
    messages_per_second: int = 0,
    bytes_per_second: int = 0,
) -> str:
    """Make a key and return its secret, which only SQS keys leave in the file; rate 0: no limit."""
    if not description.isprintable():
        raise InvalidInput("a key's description is one line of printable text")
    plain, secret = _new_secret(sqs=sqs)
    key = Key(
        permissions=permissions,
        description=description,
        hash=secret.hash,
        secret=secret.plain,
        messages_per_second=messages_per_second,
        bytes_per_second=bytes_per_second,
    )
    _check_key(path, key_id, key)
    with _changing(path) as keys:
        if key_id in keys:
            raise InvalidInput(f"there is a key {key_id!r} already: remove it first")
        keys[key_id] = key
    return plain


def _new_secret(*, sqs: bool) -> tuple[str, Secret]:
    """Make a secret, and what the file holds of it."""
    secret = base64.urlsafe_b64encode(ssl.RAND_bytes(_SECRET_BYTES)).decode()
    salt = ssl.RAND_bytes(16)
    parts = [base64.b64encode(each).decode() for each in (salt, _scrypt(secret, salt, _SCRYPT))]
    hashed = "" if sqs else ":".join(["scrypt", *map(str, _SCRYPT), *parts])
    return secret, Secret(hashed, secret if sqs else "")


def rotate_key(path: Path, key_id: str) -> str:
    """Give a key a new secret beside the one that it has, and return it; both are good."""
    with _changing(path) as keys:
        key = _key_of(keys, key_id)
        if len(key.secrets) > 1:
            raise InvalidInput(
                f"key {key_id!r} has two secrets already: 'penstock keys rotate {key_id} --finish' "
                "takes the former one away"
            )
        plain, secret = _new_secret(sqs=bool(key.secret))
        keys[key_id] = msgspec.structs.replace(
            key,
            hash=secret.hash,
            secret=secret.plain,
            former_hash=key.hash,
            former_secret=key.secret,
        )
    return plain


def finish_rotation(path: Path, key_id: str) -> None:
    """Take the former secret of a key away."""
    with _changing(path) as keys:
        key = _key_of(keys, key_id)
        if len(key.secrets) == 1:
            raise InvalidInput(f"key {key_id!r} has one secret: there is none to take away")
        keys[key_id] = msgspec.structs.replace(key, former_hash="", former_secret="")


def _key_of(keys: dict[str, Key], key_id: str) -> Key:
    if key_id not in keys:
        raise InvalidInput(f"there is no key {key_id!r:.100}")
    return keys[key_id]


def remove_key(path: Path, key_id: str) -> int:
    """Take a key out of the file; return how many are left."""
    with _changing(path) as keys:
        _key_of(keys, key_id)
        del keys[key_id]
    return len(keys)
