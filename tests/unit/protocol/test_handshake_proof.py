"""The mutual proof, byte by byte, in both roles."""

from __future__ import annotations

import pytest

from guava_nb.errors import AuthenticationError, ConfigError, LocalProtocolError, RemoteProtocolError, VersionMismatch
from guava_nb.protocol.handshake_proof import PREAMBLE, DiallerProof, ListenerProof

SECRET, OTHER = b"s" * 16, b"t" * 16
FINGERPRINT = b"f" * 16


def feed(machine, data: bytes) -> bytes:
    """Give what the machine wants and no more; return what it leaves."""
    while data and machine.bytes_wanted:
        taken = machine.bytes_wanted
        machine.receive(data[:taken])
        data = data[taken:]
    return data


def converse(dialler, listener, step: int = 1000) -> None:
    to_listener = to_dialler = b""
    while True:
        to_listener += dialler.to_send()
        to_dialler += listener.to_send()
        if not to_listener and not to_dialler:
            return
        if not listener.bytes_wanted:
            to_listener = b""
        if not dialler.bytes_wanted:
            to_dialler = b""
        taken = min(step, listener.bytes_wanted)
        listener.receive(to_listener[:taken])
        to_listener = to_listener[taken:]
        taken = min(step, dialler.bytes_wanted)
        dialler.receive(to_dialler[:taken])
        to_dialler = to_dialler[taken:]


@pytest.mark.parametrize("fingerprint", [b"", FINGERPRINT])
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_both_sides_agree(step, fingerprint):
    dialler, listener = DiallerProof(SECRET, fingerprint), ListenerProof(SECRET, fingerprint)
    converse(dialler, listener, step)
    assert dialler.done
    assert listener.done
    assert dialler.error is listener.error is None
    assert dialler.bytes_wanted == listener.bytes_wanted == 0


@pytest.mark.parametrize(
    ("secret", "fingerprint"), [(OTHER, FINGERPRINT), (SECRET, b""), (SECRET, b"g" * 16), (SECRET + b"s", FINGERPRINT)]
)
def test_other_secret_or_certificate_is_refused_on_both_sides(secret, fingerprint):
    dialler, listener = DiallerProof(secret, fingerprint), ListenerProof(SECRET, FINGERPRINT)
    converse(dialler, listener)
    assert not dialler.done
    assert not listener.done
    assert isinstance(listener.error, AuthenticationError)
    assert isinstance(dialler.error, AuthenticationError)
    assert "does not know this join code" in str(dialler.error)
    assert "Copy the newest join code" in str(dialler.error)


def test_listener_without_the_secret_is_found_out():
    dialler = DiallerProof(SECRET, FINGERPRINT)
    feed(dialler, PREAMBLE + b"n" * 32 + b"\x01" + b"p" * 32)
    assert not dialler.done
    assert isinstance(dialler.error, AuthenticationError)


def test_listener_that_repeats_the_diallers_proof_is_found_out():
    dialler = DiallerProof(SECRET, FINGERPRINT)
    dialler.to_send()
    feed(dialler, PREAMBLE + b"n" * 32)
    feed(dialler, b"\x01" + dialler.to_send())
    assert not dialler.done
    assert isinstance(dialler.error, AuthenticationError)


def test_replayed_dialler_is_refused():
    dialler, listener = DiallerProof(SECRET, FINGERPRINT), ListenerProof(SECRET, FINGERPRINT)
    recorded = dialler.to_send()
    feed(listener, recorded)
    feed(dialler, listener.to_send())
    recorded += dialler.to_send()
    again = ListenerProof(SECRET, FINGERPRINT)
    feed(again, recorded)
    assert isinstance(again.error, AuthenticationError)
    assert not again.done


def test_reflection_is_refused_by_both():
    dialler = DiallerProof(SECRET, FINGERPRINT)
    feed(dialler, dialler.to_send())
    assert isinstance(dialler.error, AuthenticationError)
    assert dialler.to_send() == b""

    listener = ListenerProof(SECRET, FINGERPRINT)
    feed(listener, PREAMBLE)
    listener.receive(listener._nonce)
    feed(listener, b"x" * 32)
    assert listener.to_send().endswith(b"\x00\x02")
    assert isinstance(listener.error, AuthenticationError)


def test_dialler_cannot_use_the_listeners_proof_as_its_own():
    # Two connections to one listener: what the listener answers on one is no answer on the other.
    honest, listener, other = (
        DiallerProof(SECRET, b""),
        ListenerProof(SECRET, b""),
        ListenerProof(SECRET, b""),
    )
    feed(listener, honest.to_send())
    feed(honest, listener.to_send())
    feed(listener, honest.to_send())
    answer = listener.to_send()[1:]
    feed(other, PREAMBLE + b"n" * 32 + answer)
    assert isinstance(other.error, AuthenticationError)


@pytest.mark.parametrize("role", [DiallerProof, ListenerProof])
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "web browser"),
        (b"HTTP/1.1 400 Bad Request\r\n", "web server"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "TLS hello"),
        (b"SSH-2.0-OpenSSH", "SSH"),
        (b"\x80\x04cos\nsystem\n", "unknown"),
    ],
)
def test_strangers_are_named_after_eight_bytes(role, data, words):
    machine = role(SECRET, b"")
    machine.receive(data[:8])
    assert isinstance(machine.error, RemoteProtocolError)
    assert words in str(machine.error)
    assert machine.bytes_wanted == 0


def test_other_version_is_named_on_both_sides():
    listener = ListenerProof(SECRET, b"")
    listener.receive(b"GUAVA1\0\0")
    assert isinstance(listener.error, VersionMismatch)
    assert listener.to_send() == PREAMBLE
    dialler = DiallerProof(SECRET, b"")
    dialler.receive(b"GUAVA1\0\0")
    assert isinstance(dialler.error, VersionMismatch)


@pytest.mark.parametrize(("answer", "words"), [(b"\x07", "means nothing"), (b"\x00\x63", "reason 99")])
def test_unknown_answers_are_errors(answer, words):
    dialler = DiallerProof(SECRET, b"")
    feed(dialler, PREAMBLE + b"n" * 32 + answer)
    assert words in str(dialler.error)


def test_bytes_beyond_the_proof_are_our_bug():
    listener = ListenerProof(SECRET, b"")
    with pytest.raises(LocalProtocolError, match="wants 8 bytes"):
        listener.receive(b"x" * 9)


def test_short_secret_is_refused():
    with pytest.raises(ConfigError, match="can be guessed"):
        ListenerProof(b"short", b"")


def test_repr_hides_the_secret():
    assert "hidden" in repr(DiallerProof(SECRET, b""))
    assert "sss" not in repr(DiallerProof(SECRET, b""))
