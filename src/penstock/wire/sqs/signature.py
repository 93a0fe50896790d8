"""AWS Signature Version 4: whether a request was signed with its key, for its body, just now.

Pure: the caller looks the secret up and says what time it is. Presigned URLs are not taken.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote

import msgspec

from penstock.wire.sqs.protocol import SqsFault

if TYPE_CHECKING:
    from collections.abc import Mapping

SKEW_MS: Final = 15 * 60_000
_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_HEADER: Final = re.compile(
    rf"{_ALGORITHM} +Credential=([^/,\s]+)/(\d{{8}})/([^/,\s]+)/([^/,\s]+)/aws4_request,"
    r"\s*SignedHeaders=([a-z0-9\-_;]+),\s*Signature=([0-9a-f]{64})"
)
_CREDENTIAL: Final = re.compile(r"Credential=([A-Za-z0-9_.-]{1,64})/")
_DATE: Final = re.compile(r"\d{8}T\d{6}Z")
_SLASHES: Final = re.compile(r"/+")
_UNSIGNED: Final = "UNSIGNED-PAYLOAD"


class Claim(msgspec.Struct, frozen=True):
    """The fields of an Authorization header; none of them is proven yet."""

    key_id: str
    date: str
    region: str
    service: str
    signed: tuple[str, ...]
    signature: str


def parse(authorization: str | None) -> Claim:
    """Read an Authorization header."""
    if not authorization:
        raise SqsFault(
            "MissingAuthenticationTokenException",
            "Request is missing Authentication Token",
            status=403,
        )
    match = _HEADER.fullmatch(authorization.strip()) if len(authorization) < 4_096 else None
    if match is None:
        raise SqsFault(
            "IncompleteSignatureException",
            f"Authorization must be of the form {_ALGORITHM} Credential=..., SignedHeaders=..., "
            "Signature=...",
        )
    key_id, date, region, service, signed, signature = match.groups()
    return Claim(key_id, date, region, service, tuple(signed.split(";")), signature)


def key_of(authorization: str | None) -> str:
    """Return the id that an Authorization header names, however wrong the rest is."""
    found = _CREDENTIAL.search((authorization or "")[:4_096])
    return "" if found is None else found[1]


def signing_key(secret: str, date: str, region: str, service: str) -> bytes:
    """Derive the key of a day, region and service."""
    key = f"AWS4{secret}".encode()
    for part in (date, region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def verify(
    claim: Claim,
    key: bytes,
    *,
    method: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    body: bytes,
    now_ms: int,
    unsigned_body: bool = False,
) -> None:
    """Raise unless the request carries the signature that ``key`` gives it.

    ``headers`` have lower-case names. ``unsigned_body`` lets the sender leave the body out of the
    signature: only where TLS protects it.
    """
    stamp = headers.get("x-amz-date", "")
    _check_time(claim, stamp, now_ms)
    for name in headers:
        if (name == "host" or name.startswith("x-amz-")) and name not in claim.signed:
            raise _refused(f"The header {name[:100]} must be signed.")
    if claim.service != "sqs" or "host" not in claim.signed:
        raise _refused("Credential must be scoped to service 'sqs', and the host must be signed.")
    payload_hash = _payload_hash(headers.get("x-amz-content-sha256"), body, unsigned=unsigned_body)
    # The request in the one form that both sides sign.
    lines = [method, _canonical_path(path), _canonical_query(query)]
    lines += [f"{name}:{' '.join(headers.get(name, '').split())}" for name in claim.signed]
    request = "\n".join([*lines, "", ";".join(claim.signed), payload_hash])
    scope = f"{claim.date}/{claim.region}/{claim.service}/aws4_request"
    hashed = hashlib.sha256(request.encode()).hexdigest()
    text = f"{_ALGORITHM}\n{stamp}\n{scope}\n{hashed}"
    expected = hmac.digest(key, text.encode(), "sha256").hex()
    if not hmac.compare_digest(expected, claim.signature):
        raise _refused(
            "The request signature we calculated does not match the signature you provided. "
            "Check your AWS Secret Access Key and signing method."
        )


def _canonical_path(path: str) -> str:
    if path in {"", "/"}:
        return "/"
    kept: list[str] = []
    for part in _SLASHES.sub("/", path).split("/")[1:]:
        if part == "..":
            if kept:
                kept.pop()
        elif part != ".":
            kept.append(part)
    return quote("/" + "/".join(kept), safe="/~")


def _canonical_query(query: str) -> str:
    pairs = []
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        pairs.append((quote(unquote(name), safe="-_.~"), quote(unquote(value), safe="-_.~")))
    return "&".join(f"{name}={value}" for name, value in sorted(pairs))


def _payload_hash(announced: str | None, body: bytes, *, unsigned: bool) -> str:
    if announced == _UNSIGNED:
        if not unsigned:
            raise _refused("An unsigned body is taken over TLS only.")
        return _UNSIGNED
    actual = hashlib.sha256(body).hexdigest()
    if announced is not None and not hmac.compare_digest(announced.encode(), actual.encode()):
        raise _refused("The body is not the one that x-amz-content-sha256 announces.")
    return actual


def _check_time(claim: Claim, stamp: str, now_ms: int) -> None:
    if not _DATE.fullmatch(stamp) or not stamp.startswith(claim.date):
        raise _refused("X-Amz-Date must be given as YYYYMMDDTHHMMSSZ, of the credential's day.")
    try:
        skew_ms = now_ms - _ms_of(stamp)
    except ValueError:
        raise _refused(f"X-Amz-Date {stamp} is no time.") from None
    if abs(skew_ms) > SKEW_MS:
        direction = "expired" if skew_ms > 0 else "not yet current"
        raise _refused(f"Signature {direction}: {stamp} is more than 15 minutes from now.")


@lru_cache(maxsize=100)
def _ms_of(stamp: str) -> int:
    """Read the time of a stamp, which is that of all requests of a second."""
    return round(datetime.fromisoformat(stamp).timestamp() * 1000)


def _refused(message: str) -> SqsFault:
    return SqsFault("InvalidSignatureException", message, status=403)
