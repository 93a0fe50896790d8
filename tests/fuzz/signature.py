"""Signatures: a header is read or refused, and what was not signed is never taken."""

from __future__ import annotations

from penstock.wire.sqs import signature
from penstock.wire.sqs.protocol import SqsFault

__all__ = ["SEEDS", "one"]

_HEADER = (
    b"AWS4-HMAC-SHA256 Credential=AKIA/20260101/us-east-1/sqs/aws4_request, "
    b"SignedHeaders=host;x-amz-date, Signature=" + b"0" * 64
)
SEEDS = (
    _HEADER + b"\n20260101T000000Z\n/a/../b//c\nx=%20&y\n" + b"e" * 64,
    _HEADER.replace(b", ", b",") + b"\n20260101T000000Z\n/\n\nUNSIGNED-PAYLOAD",
    _HEADER + b"\n20261301T256199Z\n",
    b"Bearer x\n",
    b"\n",
)
_NOW_MS = 1_767_225_600_000


def one(data: bytes) -> None:
    """Read the lines of a request: its header, date, path, query and the hash of its body."""
    lines = data.decode("latin-1").split("\n")
    authorization, stamp, path, query, announced = (*lines, "", "", "", "", "")[:5]
    headers = {"host": "x", "x-amz-date": stamp}
    if announced:
        headers["x-amz-content-sha256"] = announced
    try:
        claim = signature.parse(authorization)
        key = signature.signing_key("secret", claim.date, claim.region, claim.service)
        signature.verify(
            claim,
            key,
            method="POST",
            path=path,
            query=query,
            headers=headers,
            body=b"{}",
            now_ms=_NOW_MS,
        )
    except SqsFault:
        return
    raise AssertionError("a signature that nobody made was taken")
