"""Join codes as people paste them."""

from __future__ import annotations

import pytest

from guava_nb.errors import JoinCodeError
from guava_nb.protocol.joincode import JoinCode, check_same_session

SECRET = bytes(range(200, 216))
FINGERPRINT = bytes(range(16))
CODE = JoinCode("0.tcp.eu.ngrok.io", 17234, FINGERPRINT, SECRET)
LINE = CODE.encode()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "fe80::1%eth0", "häuschen.example", "a" * 180])
@pytest.mark.parametrize(
    ("scheme", "fingerprint"), [("tcp", b""), ("tls", FINGERPRINT), ("ws", b""), ("wss", FINGERPRINT)]
)
def test_round_trip(host, scheme, fingerprint):
    code = JoinCode(host, 65535, fingerprint, SECRET, scheme)
    line = code.encode()
    assert JoinCode.decode(line) == code
    assert line.startswith("guava1:")
    assert "\n" not in line


def test_usual_code_is_short():
    assert len(JoinCode.new("127.0.0.1", 50000, FINGERPRINT).encode()) < 85


@pytest.mark.parametrize(
    "text",
    [
        f"  {LINE}\n",
        f'"{LINE}"',
        f"\u201c{LINE}\u201d",
        f"'{LINE[:20]}'\n'{LINE[20:]}'",
        f"%guava_worker {LINE}  # lab machine",
        f">>> {LINE[:30]}\n... {LINE[30:60]}\r\n... {LINE[60:]}",
        f"$ guava worker {LINE} --gpus all",
        "\u200b".join(LINE),
        f"\ufeff{LINE}\u00a0",
        LINE.replace("guava1:", "GUAVA1: "),
        LINE + "\n" + LINE,
        f"join with {LINE} please",
        LINE.replace("-", "\u2011"),
        LINE.rstrip() + "=",
        "".join(chr(ord(c) + 0xFEE0) for c in LINE),
    ],
)
def test_what_clipboards_do_is_harmless(text):
    assert JoinCode.decode(text) == CODE


@pytest.mark.parametrize("length", range(len(LINE)))
def test_every_cut_is_found(length):
    with pytest.raises(JoinCodeError, match="cut off" if length > 6 else "no join code"):
        JoinCode.decode(LINE[:length])


def test_other_version_is_named():
    with pytest.raises(JoinCodeError, match="version 2"):
        JoinCode.decode(LINE.replace("guava1:", "guava2:"))


def test_changed_character_is_found_by_the_checksum():
    flipped = LINE[:30] + ("A" if LINE[30] != "A" else "B") + LINE[31:]
    with pytest.raises(JoinCodeError, match="checksum"):
        JoinCode.decode(flipped)


def test_errors_show_nothing_of_the_code():
    body = LINE[7:]
    for text in (body, LINE[:-3], LINE[:30] + "!" + LINE[30:], LINE.swapcase()):
        with pytest.raises(JoinCodeError) as caught:
            JoinCode.decode(text)
        assert not any(body[i : i + 6] in str(caught.value) for i in range(len(body) - 6))


def test_repr_and_str_hide_the_secret():
    for text in (repr(CODE), str(CODE), f"{CODE}"):
        assert text == "JoinCode(0.tcp.eu.ngrok.io:17234, secret hidden)"


def test_addresses():
    assert JoinCode.new("[::1]", 80).host == "::1"
    assert JoinCode.new("::1", 80).address == "[::1]:80"
    moved = CODE.with_address("example.org", 443, scheme="wss")
    assert (moved.address, moved.scheme, moved.secret, moved.fingerprint) == (
        "example.org:443",
        "wss",
        SECRET,
        FINGERPRINT,
    )
    assert CODE.with_address("::2", 1).scheme == "tls"


def test_new_draws_a_secret():
    one, two = JoinCode.new("h", 1, FINGERPRINT), JoinCode.new("h", 1, FINGERPRINT)
    assert one.secret != two.secret
    assert len(one.secret) == 16
    assert (one.scheme, JoinCode.new("h", 1).scheme) == ("tls", "tcp")


@pytest.mark.parametrize(
    "parts",
    [
        ("", 1, b"", SECRET, "tcp"),
        ("a b", 1, b"", SECRET, "tcp"),
        ("\ud800", 1, b"", SECRET, "tcp"),
        ("a" * 181, 1, b"", SECRET, "tcp"),
        ("h", 0, b"", SECRET, "tcp"),
        ("h", 65536, b"", SECRET, "tcp"),
        ("h", 1, b"", SECRET[:8], "tcp"),
        ("h", 1, b"abc", SECRET, "tls"),
        ("h", 1, b"", SECRET, "tls"),
        ("h", 1, FINGERPRINT, SECRET, "tcp"),
        ("h", 1, b"", SECRET, "carrier pigeon"),
    ],
)
def test_parts_out_of_range_are_refused(parts):
    with pytest.raises(JoinCodeError):
        JoinCode(*parts)


@pytest.mark.parametrize(
    ("scheme", "fingerprint", "secret", "same"),
    [
        ("tls", FINGERPRINT, SECRET, True),
        ("wss", FINGERPRINT, SECRET, True),
        ("wss", b"", SECRET, True),  # the tunnel's own certificate
        ("tls", FINGERPRINT[::-1], SECRET, False),
        ("wss", FINGERPRINT[::-1], SECRET, False),
        ("tls", FINGERPRINT, SECRET[::-1], False),
    ],
)
def test_a_code_of_another_secret_or_certificate_is_of_another_session(scheme, fingerprint, secret, same):
    new = JoinCode("elsewhere.example", 443, fingerprint, secret, scheme)
    for old in (CODE, JoinCode("h", 1, b"", SECRET, "ws")):
        if same or (old is not CODE and secret == SECRET):
            check_same_session(old, new)
        else:
            with pytest.raises(JoinCodeError, match="belongs to another session"):
                check_same_session(old, new)
