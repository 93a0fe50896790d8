"""`penstock serve` as a process of its own, on free ports of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from tests.waiting import wait_until

from penstock.server.keys import add_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# It reads the description of SQS once, not for each client.
BOTO = boto3.session.Session()

__all__ = ["ROOT", "Served", "eventually", "pause"]

ROOT = Path(__file__).parents[2]


def pause(seconds: float) -> None:
    """Let real time pass: the processes under test run by the machine's clock."""
    threading.Event().wait(seconds)


def eventually(condition: Callable[[], object], why: str, seconds: float = 60) -> None:
    """Wait for what another process does."""
    wait_until(condition, seconds, f"waited too long: {why}")


class Served:
    """A server with a store on disk. With ``keys``, every request must be signed."""

    def __init__(self, place: Path, *options: str, keys: bool = False) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.log = place / "log"
        self.key_id, self.secret = "AKIATESTS", "not-a-secret"
        self.token = ""
        command = [sys.executable, "-m", "penstock", "serve"]
        command += ["--store", f"rocksdb:{place}/db", "--flight", "off"]
        command += ["--http", "127.0.0.1:0", "--native", "127.0.0.1:0"]
        ports = place / "ports"
        command += ["--port-file", str(ports), *options]
        if keys:
            path = place / "keys.toml"
            self.secret = add_key(path, self.key_id, ["all"], sqs=True)
            self.token = f"{self.key_id}:{self.secret}"
            command += ["--keys", str(path)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
                stdout=log,
                stderr=log,
            )
        try:
            eventually(lambda: ports.exists() or self.process.poll() is not None, "the server")
            assert ports.exists(), self.log.read_text()
        except BaseException:
            self.close()
            raise
        lines = [line.split() for line in ports.read_text().splitlines()]
        self.ports = {name: int(port) for name, port in lines}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['http']}"

    @property
    def native(self) -> str:
        return f"penstock://127.0.0.1:{self.ports['native']}"

    @property
    def environment(self) -> Mapping[str, str]:
        """What a client's process needs to find the server, and nothing of this user's own."""
        mine = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        return {
            **mine,
            "AWS_ACCESS_KEY_ID": self.key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_PAGER": "",
            "NO_PROXY": "127.0.0.1",
        }

    def sqs(self) -> Any:
        """Return a boto3 client."""
        return BOTO.client(
            "sqs",
            region_name="us-east-1",
            aws_access_key_id=self.key_id,
            aws_secret_access_key=self.secret,
            endpoint_url=self.url,
            config=Config(retries={"max_attempts": 0}, connect_timeout=60, read_timeout=60),
        )

    @property
    def resident_bytes(self) -> int:
        """How much memory the server has."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in text.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024

    def complaints(self) -> list[str]:
        """Return what the server's log holds against itself."""
        text = self.log.read_text()
        return [line for line in text.splitlines() if " error " in line or "Traceback" in line]

    def close(self) -> None:
        """End it, in good order if it can."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
