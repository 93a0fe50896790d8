"""Keys: the file, tokens, permissions, the command."""

from __future__ import annotations

import base64
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from click.testing import CliRunner

from penstock import limits
from penstock.cli.main import cli
from penstock.errors import InvalidInput, NotAllowed
from penstock.model import Message
from penstock.server import keys as keys_file
from penstock.server import security
from penstock.server.keys import Keys, add_key, read_keys, remove_key, rotate_key
from penstock.server.security import ANYONE, Principal

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def test_a_key_opens_with_its_secret_only(path: Path) -> None:
    secret = add_key(path, "app", ["publish:orders-*", "consume:orders-eu"])
    other = add_key(path, "other", ["all"])
    keys = Keys(path)
    assert len(keys) == 2
    for _ in range(2):
        found = keys.by_token(f"app:{secret}")
        assert found is not None
        assert found.key_id == "app"
    wrong = [f"app:{other}", f"app:{secret}x", f"app:{secret[:-1]}", "app:", "app", "", ":", secret]
    wrong += [f"other:{secret}", f"nobody:{secret}", "app:\udcff", "app:" + "x" * 10_000]
    for token in wrong:
        assert keys.by_token(token) is None


def test_the_file_holds_no_secret_unless_sqs_needs_it(path: Path) -> None:
    native = add_key(path, "native", ["all"])
    sqs = add_key(path, "sqs", ["all"], sqs=True, description='with "quotes" \\ and é')
    text = path.read_text()
    assert native not in text
    assert sqs in text
    keys = Keys(path)
    assert keys.secrets_of("native") == keys.secrets_of("nobody") == []
    ((secret, principal),) = keys.secrets_of("sqs")
    assert secret == sqs
    assert principal.key_id == "sqs"
    assert keys.by_token(f"sqs:{sqs}") == principal
    assert keys.by_token(f"sqs:{native}") is None
    assert read_keys(path)["sqs"].description == 'with "quotes" \\ and é'


def test_secrets_are_long_and_each_its_own(path: Path) -> None:
    secrets = {add_key(path, f"k{n}", ["all"]) for n in range(5)}
    assert len(secrets) == 5
    assert all(len(base64.urlsafe_b64decode(each)) == 30 for each in secrets)
    hashes = [key.hash for key in read_keys(path).values()]
    assert len({each.split(":")[4] for each in hashes}) == 5


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o777])
def test_a_file_that_others_can_use_is_refused(path: Path, mode: int) -> None:
    add_key(path, "app", ["all"])
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(mode)
    with pytest.raises(InvalidInput, match=rf"open to others \(mode {mode:04o}\): chmod 600"):
        Keys(path)
    path.chmod(0o640)
    assert len(Keys(path)) == 1


def test_a_file_that_is_changed_keeps_its_group_and_mode(path: Path) -> None:
    """The server may be another user, who reads it as one of its group."""
    add_key(path, "app", ["all"])
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 12_345, 12_346)
    before = path.stat()
    add_key(path, "other", ["all"])
    after = path.stat()
    assert len(read_keys(path)) == 2
    assert [after.st_mode, after.st_uid, after.st_gid] == [
        *(before.st_mode, before.st_uid, before.st_gid)
    ]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[keys.a]\npermissions = ['all']\n", "neither a secret nor a hash"),
        ("[keys.a]\npermissions = ['fly:*']\nsecret = 's'", "'fly:\\*' is not a permission"),
        ("[keys.a]\npermissions = ['all:a b']\nsecret = 's'", "is not a permission"),
        ("[keys.'a b']\npermissions = ['all']\nsecret = 's'", "'a b' is not a key's id"),
        ("[keys.a]\nsecret = 's'", "missing required field `permissions`"),
        ("[keys.a]\npermissions = []\nsecret = 's'\npassword = 'x'", "unknown field `password`"),
        ("[keys.a]\npermissions = ['all']\nhash = 'md5:1:1:1:eA==:eA=='", "neither a secret"),
        ("[keys.a]\npermissions = ['all']\nhash = 'scrypt:1048576:8:1:eA==:eA=='", "neither"),
        ("[keys.a]\npermissions = ['all']\nsecret = 'hunter2", "not well-formed .at end of"),
        ("\xff", "not well-formed|can't be used"),
    ],
)
def test_files_that_cant_be_used(tmp_path: Path, text: str, match: str) -> None:
    path = write(tmp_path / "keys.toml", text)
    with pytest.raises(InvalidInput, match=match) as caught:
        Keys(path)
    assert "hunter2" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="'penstock keys add"):
        Keys(tmp_path / "nothing.toml")


def test_a_file_that_changes_is_read_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = add_key(path, "app", ["all"])
    keys = Keys(path)
    token = f"app:{secret}"
    assert keys.by_token(token)
    fresh = add_key(path, "fresh", ["all"])
    keys.refresh()
    assert keys.by_token(f"fresh:{fresh}")
    # What is broken leaves the keys as they were.
    body = path.read_bytes()
    path.write_bytes(b"[[[")
    keys.refresh()
    assert keys.by_token(token)
    assert "the keys stay as they were" in caplog.text
    path.write_bytes(body)
    keys_file.remove_key(path, "app")
    keys.refresh()
    assert keys.by_token(token) is None
    assert keys.by_token(f"fresh:{fresh}")


def test_a_file_without_keys_takes_none_away(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = f"app:{add_key(path, 'app', ['all'])}"
    keys, body = Keys(path), path.read_bytes()
    principal = keys.by_token(token)
    for text in ("", "[keys]", "# none"):
        path.write_text(text)
        assert not keys.reload()
        assert f"the keys stay as they were: the keys file {path} has none any more" in caplog.text
        assert keys.by_token(token) is principal is not None
        assert principal.may("publish", "q")
    path.write_bytes(body)
    assert keys.reload()
    assert keys.by_token(token) is principal


def test_changes_at_the_same_time_all_land(path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        names = [f"k{number}" for number in range(32)]
        secrets = list(threads.map(lambda name: add_key(path, name, ["all"]), names))
        keys = Keys(path)
        assert all(keys.by_token(f"{n}:{s}") for n, s in zip(names, secrets, strict=True))
        made = list(threads.map(lambda name: rotate_key(path, name), names[::2]))
        left = list(threads.map(lambda name: remove_key(path, name), names[1::2]))
    assert sorted(left) == list(range(16, 32))
    keys = Keys(path)
    assert all(keys.by_token(f"{n}:{s}") for n, s in zip(names[::2], made, strict=True))
    assert [each.name for each in path.parent.iterdir() if each.suffix == ".part"] == []


def test_a_file_that_cannot_be_written_leaves_no_part(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_key(path, "app", ["all"], sqs=True)
    before = {each: each.read_bytes() for each in path.parent.iterdir()}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InvalidInput, match="can't be written: No space left"):
        add_key(path, "other", ["all"])
    assert {each: each.read_bytes() for each in path.parent.iterdir()} == before


def test_who_is_in_already_is_subject_to_a_change_too(path: Path) -> None:
    tokens = {name: f"{name}:{add_key(path, name, ['all'])}" for name in ("a", "b", "c")}
    keys = Keys(path)
    a, b, c = (keys.by_token(token) for token in tokens.values())
    assert a is not None
    assert b is not None
    assert c is not None
    keys_file.remove_key(path, "a")
    keys_file.remove_key(path, "b")
    add_key(path, "b", ["all"])
    held = read_keys(path)
    held["c"].permissions = ["publish:x"]
    keys_file.write_keys(path, held)
    keys.reload()
    # Gone; another secret; other permissions.
    assert not a.may("publish", "x")
    assert not b.may("publish", "x")
    assert keys.by_token(tokens["b"]) is None
    assert c.may("publish", "x")
    assert not c.may("consume", "x")
    assert keys.by_token(tokens["c"]) is c


def test_keys_are_found_while_the_file_is_read_again(path: Path) -> None:
    token = f"app:{add_key(path, 'app', ['all'])}"
    keys = Keys(path)
    failures: list[object] = []

    def ask() -> None:
        failures.extend(None for _ in range(300) if keys.by_token(token) is None)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        assert keys.reload()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_hash_is_made_for_the_first_use_of_a_secret_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, sqs = f"a:{add_key(path, 'a', ['all'])}", f"b:{add_key(path, 'b', ['all'], sqs=True)}"
    add_key(path, "unused", ["all"])
    keys, hashed, scrypt = Keys(path), [], keys_file._scrypt

    def note(secret: str, *given: Any) -> bytes:
        hashed.append(secret)
        return scrypt(secret, *given)

    monkeypatch.setattr(keys_file, "_scrypt", note)
    for _ in range(2):
        assert keys.by_token(token)
        assert keys.by_token(sqs)
        for wrong in ("a:wrong", "b:wrong", "none:wrong", "a", "", f"{token}\0"):
            assert keys.by_token(wrong) is None
        assert len(hashed) == 1
        # It is known, and another is known to be wrong, after the file was read again.
        assert keys.reload()
    assert keys.by_token("unused:wrong") is None
    assert len(hashed) == 2


# --- permissions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("permission", "action", "queue", "allowed"),
    [
        ("publish:orders", "publish", "orders", True),
        ("publish:orders", "publish", "orders2", False),
        ("publish:orders", "consume", "orders", False),
        ("publish:orders-*", "publish", "orders-eu", True),
        ("publish:orders-*", "publish", "orders", False),
        ("publish:*-eu", "publish", "orders-eu", True),
        ("publish:a*b*c", "publish", "a-b-c", True),
        ("publish:a.b", "publish", "axb", False),
        ("publish:orders-*", "publish", None, False),
        ("publish:orders-*", "publish", "*", False),
        ("publish:*", "publish", None, True),
        ("publish", "publish", "anything", True),
        ("all:x", "admin", "x", True),
        ("all:x", "admin", "y", False),
        ("admin:*", "publish", "x", False),
        ("consume:*", "admin", "x", False),
    ],
)
def test_permissions(
    path: Path, permission: str, action: str, queue: str | None, allowed: bool
) -> None:
    token = f"app:{add_key(path, 'app', [permission])}"
    principal = Keys(path).by_token(token)
    assert principal is not None
    assert principal.may(action, queue) is allowed
    if allowed:
        principal.check(action, queue)
    else:
        with pytest.raises(NotAllowed, match=f"key 'app' may not {action} on") as caught:
            principal.check(action, queue)
        assert token.partition(":")[2] not in str(caught.value)


def test_names_that_no_queue_can_have_are_not_remembered() -> None:
    team = Principal("team", (("publish", "team-*"),))
    everywhere = Principal("everywhere", (("publish", "*"),))
    before = security._allows.cache_info().currsize
    for number in range(50):
        name = f"team-{number}" + "x" * 1_000
        assert not team.may("publish", name)
        assert everywhere.may("publish", name)
    assert security._allows.cache_info().currsize <= before + 2
    longest = "team-".ljust(limits.MAX_QUEUE_NAME_CHARS, "x")
    assert team.may("publish", longest)
    with pytest.raises(NotAllowed, match="may not publish on queue 'team-xxx"):
        team.check("publish", longest + "x")


def test_everybody_may_everything_without_keys() -> None:
    for action in security.ACTIONS:
        assert ANYONE.may(action, "x")
        assert ANYONE.may(action)
    assert not ANYONE.may("fly")
    assert not Principal("nobody").may("publish", "x")


def test_a_publish_is_checked_for_every_message() -> None:
    one = Principal("k", (("publish", "a*"),))
    security.check_publish(one, [Message(b"", {"queue": "a1"}), Message(b"", {"queue": "a2"})])
    for attributes in ({"queue": "b"}, {}, {"queue": 5}, {"queue": None}):
        with pytest.raises(NotAllowed):
            security.check_publish(one, [Message(b"", {"queue": "a1"}), Message(b"", attributes)])
    security.check_publish(ANYONE, [Message(b"")])


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer a:b", "a:b"),
        ("bearer  a:b ", "a:b"),
        ("Basic " + base64.b64encode(b"a:b").decode(), "a:b"),
        ("Basic ???", None),
        ("Basic " + base64.b64encode(b"\xff").decode(), None),
        ("Digest a:b", None),
        ("", None),
        (None, None),
    ],
)
def test_headers(header: str | None, token: str | None) -> None:
    assert security.token_of(header) == token


def test_loopback() -> None:
    assert all(map(security.is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "localhost"]))
    assert not any(map(security.is_loopback, ["0.0.0.0", "::", "10.0.0.1", "example.org", ""]))


# --- the command --------------------------------------------------------------------------------


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(cli, ["keys", *arguments], input=stdin)


def test_the_commands(path: Path) -> None:
    where = ["--keys", str(path)]
    added = run("add", "app", "--allow", "publish:o*", "--json", *where)
    assert added.exit_code == 0, added.output
    made = msgspec.json.decode(added.stdout)
    shown = run("add", "sqs", "--allow", "all", "--sqs", "--description", "for x", *where)
    assert "holds the secret itself" in shown.stderr
    assert "not shown again" in shown.stderr
    secret = shown.stdout.split()[3]
    listed = run("list", *where)
    assert "publish:o*" in listed.stdout
    assert "for x" in listed.stdout
    as_json = run("list", "--json", *where).stdout
    assert [each["sqs"] for each in msgspec.json.decode(as_json)] == [False, True]
    for text in (listed.stdout, as_json):
        assert secret not in text
        assert made["secret"] not in text
        assert "scrypt" not in text
    app = Keys(path).by_token(made["token"])
    assert app is not None
    assert (app.may("publish", "orders"), app.may("admin")) == (True, False)
    assert run("remove", "app", *where).stdout == "removed app\n"
    assert Keys(path).by_token(made["token"]) is None


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["add", "app", "--allow", "all"], "there is a key 'app' already"),
        (["add", "a b", "--allow", "all"], "is not a key's id"),
        (["add", "b", "--allow", "eat:*"], "is not a permission"),
        (["add", "b", "--allow", "all", "--description", "a\nb"], "one line of printable text"),
        (["remove", "b"], "there is no key 'b'"),
    ],
)
def test_what_the_commands_refuse(path: Path, arguments: list[str], match: str) -> None:
    add_key(path, "app", ["all"])
    before = path.read_bytes()
    ended = run(*arguments, "--keys", str(path))
    assert ended.exit_code == 1
    assert match in ended.stderr
    assert path.read_bytes() == before
