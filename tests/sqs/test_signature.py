"""Signatures: what botocore's own signer makes is accepted, and nothing that differs from it."""

from __future__ import annotations

import dataclasses
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError
from hypothesis import given
from hypothesis import strategies as st
from tests.sqs.serving import client_of, serving
from tests.sqs.test_messages import code_of

from penstock.clock import SystemClock
from penstock.server.keys import Keys, add_key
from penstock.wire.sqs import signature
from penstock.wire.sqs.protocol import SqsFault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.sqs.serving import Served

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
HOST = "sqs.test:9324"


@dataclasses.dataclass
class Signed:
    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    now_ms: int

    def verify(self, *, secret: str = SECRET, unsigned_body: bool = False) -> None:
        claim = signature.parse(self.headers.get("authorization"))
        signature.verify(
            claim,
            signature.signing_key(secret, claim.date, claim.region, claim.service),
            method=self.method,
            path=self.path,
            query=self.query,
            headers=self.headers,
            body=self.body,
            now_ms=self.now_ms,
            unsigned_body=unsigned_body,
        )


def sign(
    body: bytes = b"{}",
    *,
    method: str = "POST",
    path: str = "/",
    query: str = "",
    extra: dict[str, str] | None = None,
    region: str = "eu-west-3",
    token: str | None = None,
) -> Signed:
    """Have botocore sign a request, and show it as it would arrive."""
    request = AWSRequest(
        method=method,
        url=f"http://{HOST}{path}" + (f"?{query}" if query else ""),
        data=body,
        headers={"X-Amz-Target": "AmazonSQS.ListQueues", **(extra or {})},
    )
    now_ms = SystemClock().now_ms()
    botocore.auth.SigV4Auth(Credentials("AKID", SECRET, token), "sqs", region).add_auth(request)
    headers = {"host": HOST, **{name.lower(): value for name, value in request.headers.items()}}
    return Signed(method, path, query, headers, body, now_ms)


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"body": b""},
        {"body": "é".encode() * 1000},
        {"method": "GET", "query": "Action=ListQueues&B=%20x&A="},
        {"path": "/000000000000/some-queue.fifo"},
        {"path": "/a//b/./c/../d"},
        {"path": "/with%20blank/%C3%A9"},
        {"extra": {"X-Amz-Meta": "  many   blanks "}},
        {"token": "session-token"},
    ],
)
def test_what_botocore_signs_is_accepted(request_: dict[str, Any]) -> None:
    sign(**request_).verify()


@given(body=st.binary(max_size=200), blank=st.booleans())
def test_any_body_is_accepted_as_signed_and_refused_when_changed(body: bytes, blank: bool) -> None:
    signed = sign(body)
    signed.verify()
    signed.body = body + (b" " if blank else b"\x00")
    with pytest.raises(SqsFault) as fault:
        signed.verify()
    assert fault.value.code == "InvalidSignatureException"


@pytest.mark.parametrize(
    "change",
    [
        {"method": "PUT"},
        {"path": "/other"},
        {"query": "a=b"},
        {"now_ms": +16 * 60_000},
        {"now_ms": -16 * 60_000},
        {"headers": {"host": "evil.test"}},
        {"headers": {"x-amz-target": "AmazonSQS.DeleteQueue"}},
        {"headers": {"x-amz-date": "20200101T000000Z"}},
        {"headers": {"x-amz-date": "99999999T999999Z"}},
        {"headers": {"x-amz-other": "not signed"}},
        {"headers": {"x-amz-content-sha256": "0" * 64}},
        {"headers": {"x-amz-content-sha256": "UNSIGNED-PAYLOAD"}},
    ],
)
def test_what_differs_from_what_was_signed_is_refused(change: dict[str, Any]) -> None:
    signed = sign()
    headers = {**signed.headers, **change.pop("headers", {})}
    shift_ms = change.pop("now_ms", 0)
    changed = dataclasses.replace(
        signed, headers=headers, now_ms=signed.now_ms + shift_ms, **change
    )
    with pytest.raises(SqsFault) as fault:
        changed.verify()
    assert fault.value.status == 403


def test_clocks_may_differ_by_almost_a_quarter_of_an_hour() -> None:
    for shift_ms in (-14 * 60_000, 14 * 60_000):
        signed = sign()
        signed.now_ms += shift_ms
        signed.verify()


def test_another_secret_is_refused() -> None:
    with pytest.raises(SqsFault, match="does not match"):
        sign().verify(secret="another")


def test_an_unsigned_body_is_for_tls_only() -> None:
    signed = sign(extra={"X-Amz-Content-SHA256": "UNSIGNED-PAYLOAD"})
    signed.verify(unsigned_body=True)
    with pytest.raises(SqsFault, match="TLS"):
        signed.verify()


@given(st.text())
def test_no_garbage_is_a_signature(text: str) -> None:
    with pytest.raises(SqsFault):
        signature.parse(text)


@given(st.integers(0, 200), st.characters())
def test_a_damaged_header_is_refused(at: int, mark: str) -> None:
    signed = sign()
    header = signed.headers["authorization"]
    at %= len(header)
    key_id = range(header.index("AKID"), header.index("AKID") + 4)
    if at in key_id:
        # Whose secret is looked up depends on it, which this test does not do.
        return
    if header[at] == mark or (header[at].isspace() and mark.isspace()):
        return
    signed.headers["authorization"] = header[:at] + mark + header[at + 1 :]
    with pytest.raises(SqsFault):
        signed.verify()
    signed.headers["authorization"] = header + mark
    if not mark.isspace():
        with pytest.raises(SqsFault):
            signed.verify()


# --- through the server ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, dict[str, str]]]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
    secrets = {
        "root": add_key(path, "root", ["all"], sqs=True),
        "writer": add_key(path, "writer", ["publish:in-*"], sqs=True),
        "reader": add_key(path, "reader", ["consume:in-*"], sqs=True),
        "native": add_key(path, "native", ["all"]),
    }
    with serving(keys=Keys(path)) as served:
        yield served, secrets


def as_key(keyed: tuple[Served, dict[str, str]], key_id: str, secret: str | None = None) -> Any:
    served, secrets = keyed
    return client_of(
        served, aws_access_key_id=key_id, aws_secret_access_key=secret or secrets[key_id]
    )


def test_keys_may_do_what_they_are_allowed(keyed: tuple[Served, dict[str, str]]) -> None:
    root, writer, reader = (as_key(keyed, name) for name in ("root", "writer", "reader"))
    url = root.create_queue(QueueName="in-1")["QueueUrl"]
    other = root.create_queue(QueueName="out-1")["QueueUrl"]
    writer.send_message(QueueUrl=url, MessageBody="1")
    (got,) = reader.receive_message(QueueUrl=url, AttributeNames=["SenderId"])["Messages"]
    assert got["Attributes"] == {"SenderId": "writer"}
    reader.delete_message(QueueUrl=url, ReceiptHandle=got["ReceiptHandle"])
    assert writer.get_queue_url(QueueName="in-1")["QueueUrl"] == url
    assert reader.list_queues()["QueueUrls"] == [url]
    refused: list[Callable[[], Any]] = [
        lambda: writer.send_message(QueueUrl=other, MessageBody="1"),
        lambda: writer.receive_message(QueueUrl=url),
        lambda: reader.send_message(QueueUrl=url, MessageBody="1"),
        lambda: reader.purge_queue(QueueUrl=url),
        lambda: reader.create_queue(QueueName="in-2"),
        lambda: reader.get_queue_attributes(QueueUrl=other, AttributeNames=["All"]),
        lambda: writer.delete_queue(QueueUrl=url),
        lambda: writer.tag_queue(QueueUrl=url, Tags={"a": "b"}),
        lambda: writer.set_queue_attributes(QueueUrl=url, Attributes={"DelaySeconds": "1"}),
    ]
    for call in refused:
        with pytest.raises(ClientError) as error:
            call()
        assert code_of(error) == "AccessDenied"
        assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403


def test_a_key_that_was_not_made_for_sqs_is_named_in_the_log_once(
    keyed: tuple[Served, dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    for key_id in ("native", "native", "nobody"):
        with pytest.raises(ClientError):
            as_key(keyed, key_id, "any").list_queues()
    said = [each.getMessage() for each in caplog.records if "--sqs" in each.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("key native was not made with --sqs")


def test_who_is_not_known_is_refused(keyed: tuple[Served, dict[str, str]]) -> None:
    for key_id, secret, code in (
        ("root", "wrong", "SignatureDoesNotMatch"),
        ("nobody", "wrong", "InvalidClientTokenId"),
        ("native", None, "InvalidClientTokenId"),
    ):
        with pytest.raises(ClientError) as error:
            as_key(keyed, key_id, secret).list_queues()
        assert code_of(error) == code
        assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
    with pytest.raises(urllib.error.HTTPError) as unsigned:
        urllib.request.urlopen(f"{keyed[0].url}/?Action=ListQueues")
    assert unsigned.value.code == 403
    assert b"MissingAuthenticationToken" in unsigned.value.read()
    unsigned.value.close()
