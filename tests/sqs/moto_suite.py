"""moto's own SQS tests, from its source distribution, against this server.

Run it by itself to see what passes: ``python tests/sqs/moto_suite.py``. The source distribution of
the moto that is installed is fetched once, into a cache outside of the repository
(``PENSTOCK_TEST_CACHE``, by default ``~/.cache/penstock-tests``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
from collections import Counter
from collections.abc import Coroutine
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast
from xml.etree import ElementTree as ET

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tests.sqs.serving import serving

from penstock.server.http import Answering, Handler, Request, Response
from penstock.server.sqs import SqsOptions

ACCOUNT = "123456789012"
EXPECTED = Path(__file__).with_name("moto_expected.toml")
# The suite asks who it is before some tests; that is all of STS that it needs.
_WHO = (
    '<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
    f"<GetCallerIdentityResult><Arn>arn:aws:sts::{ACCOUNT}:user/test</Arn><UserId>TEST</UserId>"
    f"<Account>{ACCOUNT}</Account></GetCallerIdentityResult></GetCallerIdentityResponse>"
).encode()


class Expected(NamedTuple):
    """What is known not to pass, by name, with the reason."""

    not_run: dict[str, str]
    fails: dict[str, str]


def expected() -> Expected:
    """Read the list."""
    return Expected(**tomllib.loads(EXPECTED.read_text()))


def fetched() -> Path:
    """Return the directory that has moto's ``tests``, fetching it if need be."""
    release = version("moto")
    cache = Path(os.environ.get("PENSTOCK_TEST_CACHE", "~/.cache/penstock-tests")).expanduser()
    place = cache / f"moto-{release}"
    if not (place / "tests" / "test_sqs").is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        command = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(cache)]
        subprocess.run(
            [sys.executable, "-m", "pip", *command, f"moto=={release}"], check=True, timeout=300
        )
        with tarfile.open(cache / f"moto-{release}.tar.gz") as archive:
            wanted = [
                member
                for member in archive.getmembers()
                if "/tests/test_sqs/" in member.name
                or ("/tests/" in member.name and member.name.count("/") == 2)
            ]
            # Not extractall(filter=): Python has it from 3.11.4 on.
            for member in wanted:
                content = archive.extractfile(member)
                if content is not None:
                    file = cache / member.name
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(content.read())
    return place


def _for_the_suite(handle: Handler) -> Handler:
    """Answer beside SQS what the suite asks of moto's own server."""

    async def ask(operation: str, **fields: str) -> dict[str, Any]:
        target = {"x-amz-target": f"AmazonSQS.{operation}"}
        request = Request("POST", "/", "", target, json.dumps(fields).encode(), "")
        answer = await cast(Coroutine[Any, Any, Response], handle(request))
        assert answer.status == 200, answer.body
        return cast(dict[str, Any], json.loads(answer.body))

    async def delete_all_queues() -> Response:
        for url in (await ask("ListQueues")).get("QueueUrls", []):
            await ask("DeleteQueue", QueueUrl=url)
        return Response(200, b'{"status": "ok"}', "application/json")

    def answer(request: Request) -> Answering:
        if b"Action=GetCallerIdentity" in request.body:
            return Response(200, _WHO, "text/xml")
        if request.path == "/moto-api/reset":
            return delete_all_queues()
        return handle(request)

    return answer


def run(report: Path, *more: str) -> dict[str, str]:
    """Run the suite; return the outcome of each test: passed, failed or skipped."""
    place = fetched()
    options = SqsOptions(account=ACCOUNT, url="http://localhost:5000")
    with serving(options=options, wrap=_for_the_suite) as served:
        environment = {
            **os.environ,
            "TEST_SERVER_MODE": "true",
            "TEST_SERVER_MODE_ENDPOINT": served.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "PYTHONPATH": str(place),
        }
        for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "AWS_PROFILE"):
            environment.pop(name, None)
        leave_out = [f"--ignore=tests/test_sqs/{name}" for name in expected().not_run]
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "tests/test_sqs", "-q", "-p", "no:cacheprovider"),
                *("-p", "no:randomly", f"--junitxml={report}", *leave_out, *more),
            ],
            cwd=place,
            env=environment,
            check=False,
            timeout=1_800,
        )
    outcomes: dict[str, str] = {}
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        outcomes[str(case.get("name"))] = "skipped" if "skipped" in kinds else outcome
    return outcomes


def run_patiently(report: Path) -> dict[str, str]:
    """Run the suite, and up to twice more what fails though it is not expected to.

    Some of moto's tests leave a server no more than a second, and some time it.
    """
    outcomes = run(report)
    for _ in range(2):
        odd = {name for name, outcome in outcomes.items() if outcome == "failed"}
        odd -= set(expected().fails)
        if not odd:
            break
        again = run(report, "-k", " or ".join({name.partition("[")[0] for name in odd}))
        outcomes |= {name: outcome for name, outcome in again.items() if name in odd}
    return outcomes


def say(*words: object) -> None:
    """Print a line."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def main() -> None:
    """Run the suite and say what is not as the list has it."""
    report = fetched() / "report.xml"
    outcomes = run_patiently(report)
    say(dict(Counter(outcomes.values())), "report:", report)
    failed = {name for name, outcome in outcomes.items() if outcome == "failed"}
    known = set(expected().fails)
    for name in sorted(failed - known):
        say("fails, unexpected:", name)
    for name in sorted(known - failed):
        say("passes, though listed:", name)
    sys.exit(failed != known)


if __name__ == "__main__":
    main()
