"""The page of `guava status --web`: what it answers, to whom, and what it says of its age."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from guava_nb.cli.main import main
from guava_nb.cli.status import shown_view
from guava_nb.cli.web import _MOST_CONNECTIONS, StatusPage, _Until, lan_address
from guava_nb.cluster.session_status import ShownStatus
from guava_nb.errors import ConfigError
from guava_nb.status import Status
from tests.unit.render.status_cases import RUN, STATUS

SECRET = "guava1:AAAABBBBCCCCDDDDEEEEFFFFGGGGHHHHIIIIJJJJ"


class Session:
    """What the session's file holds."""

    def __init__(self) -> None:
        self.status: Status | None = replace(STATUS, run=RUN, notes=(f"<script>alert(1)</script> {SECRET}",))
        self.at, self.lives = time.time(), True

    def read(self) -> ShownStatus | None:
        return None if self.status is None else ShownStatus(7, 0.0, self.at, self.status)


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def page(session: Session) -> Iterator[StatusPage]:
    made = StatusPage(session.read, lambda shown: shown_view(shown, time.time(), session.lives))
    thread = threading.Thread(target=made.serve)
    thread.start()
    yield made
    made.close()
    thread.join()


def get(address: str) -> tuple[int, str, dict[str, str]]:
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


def test_only_who_has_the_token_is_answered(page: StatusPage) -> None:
    whole = page.address("127.0.0.1")
    for address in (
        whole.partition("?")[0],
        whole[:-1],
        whole.replace("token=", "token=a"),
        whole.replace("/?", "/panel?") + "a",
    ):
        status, text, _ = get(address)
        assert status == 403 and "token" in text and "loss" not in text
    assert get(whole)[0] == 200
    assert get(whole.replace("/?", "/etc/passwd?"))[0] == 404


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET http://[ HTTP/1.1", b"403"),
        (b"GET http://[?token=TOKEN HTTP/1.1", b"404"),
        (b"GET /?token=%ff\xff%ed%a0%80 HTTP/1.1", b"403"),
        (b"GET /?token=TOKEN&" + b"token=a&" * 5000 + b" HTTP/1.1", b"200"),
        (b"GET /..%2f..%2fetc/passwd?token=TOKEN HTTP/1.1", b"404"),
        (b"BREW /?token=TOKEN HTTP/1.1", b"403"),
        (b"POST / HTTP/1.1", b"403"),
        (b"HEAD /?token=TOKEN HTTP/1.1", b"403"),
        (b"GET / HTTP/9.9", b"403"),
        (b"no request at all", b"403"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200, b"403"),
        (b"GET /\x00 HTTP/1.1", b"403"),
    ],
)
def test_odd_requests_get_an_answer_and_say_nothing_in_the_terminal(
    page: StatusPage, request_line: bytes, status: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", page.port), timeout=10) as odd:
        odd.sendall(request_line.replace(b"TOKEN", page.token.encode()) + b"\r\n\r\n")
        answer = odd.makefile("rb").read()
    assert answer.split(b" ", 2)[1] == status
    refused = not request_line.startswith(b"GET") or b"HTTP/9" in request_line or request_line.count(b":") > 100
    assert answer.endswith(b"\r\n\r\n") is refused, "only what asks for a page gets a sentence"
    assert b"python" not in answer.lower() and b"server:" not in answer.lower()
    assert page.token.encode() not in answer and capsys.readouterr().err == ""


def test_silent_connections_are_few_and_keep_no_one_out(page: StatusPage) -> None:
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", page.port), timeout=10) for _ in range(_MOST_CONNECTIONS + 8)]
    try:
        assert get(page.address("127.0.0.1"))[0] == 200
        assert threading.active_count() - before <= _MOST_CONNECTIONS
        assert silent[0].recv(1) == b""  # who has been here longest left
    finally:
        for one in silent:
            one.close()


def test_a_request_has_one_time_limit_however_slowly_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("guava_nb.cli.web.time", SimpleNamespace(monotonic=lambda: now[0]))
    here, there = socket.socketpair()
    with here, there:
        reader, taken = _Until(here, now[0] + 10.0), bytearray(1)
        for _ in range(2):
            there.sendall(b"G")
            assert reader.readinto(taken) == 1
            now[0] += 4.5
        there.sendall(b"G")
        assert reader.readinto(taken) == 1 and here.gettimeout() == 1.0
        now[0] += 4.5
        there.sendall(b"G")
        with pytest.raises(TimeoutError):
            reader.readinto(taken)


def test_a_request_without_end_is_read_no_further_than_a_request_may_have() -> None:
    here, there = socket.socketpair()
    with here, there:
        reader, view, read_bytes = _Until(here, time.monotonic() + 60.0), bytearray(4096), 0
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                there.sendall(bytes(4096))
                read_bytes += reader.readinto(view)
        assert 64 << 10 <= read_bytes < 72 << 10


def test_a_handler_reads_within_that_limit_and_a_broken_connection_is_no_fault_of_ours(
    page: StatusPage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("guava_nb.cli.web._REQUEST_S", 0.0)
    with socket.create_connection(("127.0.0.1", page.port), timeout=10) as late:
        late.sendall(b"GET / HTTP/1.0\r\n")
        assert late.recv(1) == b""
    try:
        raise BrokenPipeError
    except BrokenPipeError:
        page._server.handle_error(None, None)
    assert "BrokenPipe" not in capsys.readouterr().err


def test_it_shows_the_run_escaped_and_without_the_join_code(page: StatusPage) -> None:
    for path in ("/?", "/panel?"):
        status, text, headers = get(page.address("127.0.0.1").replace("/?", path))
        assert status == 200 and "<svg" in text and "2/69" not in text and "5/69 steps" in text and "as of " in text
        assert "<script>alert" not in text and SECRET not in text and "guava1:&lt;hidden&gt;" in text
        assert (
            headers["Referrer-Policy"] == "no-referrer" and "default-src 'none'" in headers["Content-Security-Policy"]
        )


def test_what_is_old_ended_or_closed_is_said(page: StatusPage, session: Session) -> None:
    panel = page.address("127.0.0.1").replace("/?", "/panel?")
    session.at -= 60
    assert "Nothing new since" in get(panel)[1]
    session.lives = False
    assert "has ended without closing it" in get(panel)[1]
    session.status = None
    text = get(panel)[1]
    assert "The session was closed." in text and "5/69 steps" in text


def test_it_listens_on_this_machine_alone_and_a_taken_port_is_told(page: StatusPage) -> None:
    assert page._server.server_address[0] == "127.0.0.1"
    with pytest.raises(ConfigError, match="choose another --port"):
        StatusPage(lambda: None, lambda shown: shown_view(shown, 0.0, True), port=page.port)
    assert lan_address().count(".") == 3


@pytest.mark.parametrize("words", [["--lan"], ["--port", "80"], ["--web", "--port", "70000"]])
def test_options_that_do_not_fit_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", *words]) == 2
    assert "--port" in capsys.readouterr().err
