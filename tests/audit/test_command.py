"""``penstock check``: what it prints, and how it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from click.testing import CliRunner

import penstock
from penstock.cli.main import cli
from penstock.store.codec.opendata import payload_key

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"rocksdb:{tmp_path / 'store'}"
    with penstock.open(url, background=False) as broker:
        broker.create_queue("jobs")
        broker.send("jobs", b"1")
    return url


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["check", *arguments])


def spoil(url: str) -> None:
    with penstock.open(url, background=False) as broker:
        store: Any = broker._store
        engine = store.engine
        batch = engine.batch()
        batch.put(payload_key(4_000), b"?", engine.table("payloads").family)
        engine.commit(batch)


def test_a_clean_store(url: str) -> None:
    result = run("--store", url)
    assert result.exit_code == 0, result.output
    assert "no violations, 0 notes" in result.output
    assert "payloads" in result.output


def test_a_spoilt_store_ends_with_1_until_it_is_repaired(url: str) -> None:
    spoil(url)
    result = run("--store", url)
    assert result.exit_code == 1
    assert "garbage" in result.output
    assert payload_key(4_000).hex() in result.output
    assert "1 violations, 1 left, 0 notes" in result.output
    result = run("--store", url, "--repair")
    assert result.exit_code == 0
    assert "1 violations, 0 left, 0 notes" in result.output
    assert run("--store", url).exit_code == 0


def test_json(url: str) -> None:
    spoil(url)
    result = run("--store", url, "--json")
    assert result.exit_code == 1
    report = msgspec.json.decode(result.output)
    assert report["ok"] is False
    assert report["found"] == {"garbage": 1}
    assert report["violations"][0]["table"] == "payloads"
    assert report["violations"][0]["repaired"] is False
