"""The TLS layer's own promises: who is met, what strangers see, and that keys stay in memory."""

from __future__ import annotations

import os
import ssl
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from guava_nb.errors import AuthenticationError, GuavaError, LinkBroken, LinkTimeout, RemoteProtocolError
from guava_nb.transport import tls
from guava_nb.transport.certificate import Certificate, self_signed_certificate
from guava_nb.transport.memory import memory_pair
from guava_nb.transport.tls import TlsStream, _pieces
from tests.support.nginx import certify

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    return self_signed_certificate()


def test_no_key_stays_on_disk_or_in_repr(
    certificate: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patch:
        if sys.platform == "linux":
            patch.setattr(tempfile, "mkstemp", None)  # none is made on a disk, not even for a moment
        certificate.server_context()
    for has_memory_files in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(os, "access", lambda path, mode: False)  # no /proc
            if not has_memory_files:
                patch.delattr(os, "memfd_create", raising=False)
            certificate.server_context()
        assert list(tmp_path.iterdir()) == []
    assert b"PRIVATE" in certificate.key
    assert "PRIVATE" not in repr(certificate)
    assert len(certificate.fingerprint16) == 16


def test_another_certificate_is_refused_with_both_fingerprints(certificate: Certificate) -> None:
    client, server = memory_pair()
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(TlsStream.over_server, server, certificate.server_context(), 5)
        with pytest.raises(AuthenticationError) as caught:
            TlsStream.over_client(client, bytes(16), 5)
        client.close()
        serving.exception()
    assert certificate.fingerprint16[:4].hex() in str(caught.value)
    assert "00000000" in str(caught.value)


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "plain HTTP request"),
        (b"GUAVA9\0\0" + bytes(32), "does not speak our TLS"),
        (bytes(100), "does not speak our TLS"),
    ],
)
def test_strangers_at_the_listener(certificate: Certificate, hello: bytes, why: str) -> None:
    client, server = memory_pair()
    client.send_all([hello])
    with pytest.raises(RemoteProtocolError, match=why):
        TlsStream.over_server(server, certificate.server_context(), 5)


def test_old_tls_is_refused(certificate: Certificate) -> None:
    client, server = memory_pair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with ThreadPoolExecutor(1) as pool:
        old = pool.submit(TlsStream(client, context, server_side=False)._shake_hands, 5)
        with pytest.raises(RemoteProtocolError, match="no TLS 1.3"):
            TlsStream.over_server(server, certificate.server_context(), 5)
        assert isinstance(old.exception(), GuavaError)


def test_silence_ends_the_handshake(certificate: Certificate) -> None:
    _, server = memory_pair()
    with pytest.raises(LinkTimeout):
        TlsStream.over_server(server, certificate.server_context(), 0.05)


def test_a_trickle_does_not_prolong_the_handshake(certificate: Certificate, monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = memory_pair()
    client.send_all([b"\x16\x03\x01\x02\x00\x01"])  # begins like a hello that never ends
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr("guava_nb.transport.tls.time.monotonic", lambda: next(clock))
    monkeypatch.setattr(server, "set_deadline", lambda recv_s: client.send_all([b"\x00"]))
    with pytest.raises(LinkTimeout, match="not done within 10 s"):
        TlsStream.over_server(server, certificate.server_context(), 10)


def test_leaving_during_the_handshake(certificate: Certificate) -> None:
    client, server = memory_pair()
    client.close()
    with pytest.raises(LinkBroken, match="during the TLS handshake"):
        TlsStream.over_server(server, certificate.server_context(), 5)


def test_damaged_ciphertext_is_a_broken_link(certificate: Certificate) -> None:
    raw_client, raw_server = memory_pair()
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(TlsStream.over_server, raw_server, certificate.server_context(), 5)
        client = TlsStream.over_client(raw_client, certificate.fingerprint16, 5)
        server = serving.result()
    raw_client.send_all([b"\x17\x03\x03\x00\x20" + bytes(32)])
    with pytest.raises(LinkBroken, match="TLS from"):
        server.recv_into(memoryview(bytearray(8)))
    client.close()


@pytest.mark.parametrize(
    "sizes", [[1], [132, 1 << 20], [10, 20, 70000, 5], [16384, 16384], [16000, 16000, 1], [99999] * 3]
)
def test_pieces_keep_every_byte_in_order(sizes: list[int]) -> None:
    data = [bytes([index + 1]) * size for index, size in enumerate(sizes)]
    pieces = list(_pieces([memoryview(part) for part in data]))
    assert b"".join(bytes(view) for piece in pieces for view in piece) == b"".join(data)
    assert all(sum(map(len, piece)) < 144 << 10 for piece in pieces)


def test_authorities_of_the_system_or_of_certifi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certify(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "none"))
    (own,) = tls._gateway_context().get_ca_certs()
    assert own["subject"] == ((("commonName", "guava test authority"),),)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))  # as on a machine that came without any
    monkeypatch.setitem(sys.modules, "certifi", SimpleNamespace(where=lambda: str(tmp_path / "authority.pem")))  # type: ignore[arg-type]
    assert tls._gateway_context().get_ca_certs() == [own]
    monkeypatch.setitem(sys.modules, "certifi", None)  # type: ignore[arg-type]
    context = tls._gateway_context()
    assert context.get_ca_certs() == []
    assert context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname


def test_a_small_message_waits_for_no_turn(certificate: Certificate) -> None:
    client, server = memory_pair(4 << 20)
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(TlsStream.over_server, server, certificate.server_context(), 5)
        ours = TlsStream.over_client(client, certificate.fingerprint16, 5)
        theirs = serving.result()
        with tls._TURN:  # others decrypt much
            ours.send_all([b"urgent"])
            view = memoryview(bytearray(64))
            assert bytes(view[: theirs.recv_into(view)]) == b"urgent"
            much = bytes(range(256)) * 2048
            ours.send_all([much])
            reading = pool.submit(_read, theirs, len(much))
        assert reading.result() == much


def test_the_buffer_of_a_stranger_does_not_grow_however_much_it_sends(certificate: Certificate) -> None:
    client, server = memory_pair(4 << 20)
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(TlsStream.over_server, server, certificate.server_context(), 5)
        ours = TlsStream.over_client(client, certificate.fingerprint16, 5)
        theirs = serving.result()
    much = bytes(range(256)) * (6 << 10)
    ours.send_all([much])
    proof = memoryview(bytearray(1))
    for byte in much[:72]:  # as the proof is read: a few bytes at a time, and no more than it has
        assert theirs.recv_into(proof) == 1 and proof[0] == byte
        assert theirs._fetched.nbytes + theirs._incoming.pending <= 64 << 10
    assert _read(theirs, len(much) - 72) == much[72:]
    assert theirs._fetched.nbytes == tls._FETCH_BYTES  # a stream that brings much takes much at once


def _read(stream: TlsStream, nbytes: int) -> bytes:
    view, done = memoryview(bytearray(nbytes)), 0
    while done < nbytes:
        done += stream.recv_into(view[done:])
    return bytes(view)
