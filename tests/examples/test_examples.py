"""The examples run, and show what they say they show."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def shown(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="example")["main"]()
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def test_fan_out(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown("fan_out", capsys)
    fraud = lines.index("fraud takes orders where price >= 1000 OR customer = 'new':")
    assert lines[fraud + 1 : fraud + 3] == ["3  a first edition", "4  a film to stream"]
    assert "warehouse 0 to do, 2 done" in lines
    assert "messages that no queue took: 1" in lines


def test_fair_tenants(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown("fair_tenants", capsys)
    assert "without groups the last of them was served after 10009 messages" in lines
    assert "with the tenant as the group, after 10" in lines
    assert lines[-1] == "megacorp loses nothing: 9999 wait, the next five are for megacorp."


def test_fifo_accounts(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown("fifo_accounts", capsys)
    assert lines[0] == "600 bookings for 6 accounts"
    assert len([line for line in lines if line.endswith("balance 0")]) == 6
    assert lines[-1] == "withdrawals refused because they came before their deposit: 0"


def test_delayed_retries(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown("delayed_retries", capsys)
    assert "now: 0 to claim" in lines
    assert "attempt 3: connection refused, so it is retrying" in lines
    assert "attempt 4: connection refused, so it is failed" in lines
    assert lines[-2:] == ["attempt 5: delivered", "waiting 0, failed 0, done 1"]


def test_worker(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown("worker", capsys)
    assert lines[0] == "199 of 200 orders were charged, each once: 199"
    assert lines[1:3] == ["Retry: 20 times", "StolenCard: 3 times"]
    assert lines[3] == "handlers ran 222 times; given back: 23"
    assert lines[4].startswith("given up: order 66, ")
    assert lines[4].endswith("StolenCard: the card of order 66")


def test_backfill(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown("backfill", capsys)
    assert lines[0].startswith("After a week: 6384 orders, 336 messages")
    assert "now it has 336" in lines
    assert "once more: 0 added, for it has had them all" in lines
    assert lines[-1] == "1920 messages, the first of Saturday 00:00"
