"""Where the clients that nobody here wrote are found, and what happens where one is missing.

``make clients`` installs them beside the virtual environment's own packages, outside of git: the
AWS CLI in an environment of its own, since it pins another botocore, and the npm packages. The
tests of Go and Java are built there, too, where these languages are: nobody else needs them.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest

__all__ = ["CLIENTS", "aws_cli", "built", "missing", "node", "node_modules"]

CLIENTS = Path(sys.prefix) / "clients"


def missing(what: str) -> NoReturn:
    """Skip a test whose client is not here; on CI, where everything must be, fail it."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} is missing", pytrace=False)
    pytest.skip(f"{what} is missing: make clients")


def built(*parts: str) -> str:
    """Return the path of what was built, where the language of the client is; skip where not."""
    path = CLIENTS.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{parts[-1]} is missing: make clients builds it where {parts[0]} is")
    return str(path)


def aws_cli() -> str:
    """Return the path of the AWS CLI."""
    path = CLIENTS / "awscli" / "bin" / "aws"
    if not path.exists():
        missing("the AWS CLI")
    return str(path)


def node() -> str:
    """Return the path of node."""
    path = shutil.which("node")
    if path is None:
        missing("node")
    return path


def node_modules() -> Path:
    """Return the directory that has the npm packages."""
    path = CLIENTS / "node" / "node_modules"
    if not (path / "sqs-consumer").is_dir() or not (path / "@aws-sdk" / "client-sqs").is_dir():
        missing("@aws-sdk/client-sqs or sqs-consumer")
    return path
