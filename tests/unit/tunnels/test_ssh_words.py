"""What ssh says becomes one sentence with a next step, whatever it says. No network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.tunnels.ssh_words import Asked, forwarded_port, is_chatter, why_not

#: What ssh says last where it was to go through another host.
CLOSED = "kex_exchange_identification: Connection closed by remote host\nConnection closed by UNKNOWN port 65535"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("ssh: Could not resolve hostname lab: Name or service not known", "finds no machine called lab"),
        ("ssh: Could not resolve hostname lab: No such host is known. ", "finds no machine called lab"),
        ("ssh: connect to host lab port 22: Connection refused", "its ssh port does not answer"),
        ("ssh: connect to host lab port 22: Connection timed out", "did not answer in time"),
        ("ssh: connect to host lab port 22: No route to host", "did not answer in time"),
        ("Connection timed out during banner exchange", "did not answer in time"),
        ("me@lab: Permission denied (publickey,password).", "ssh-copy-id me@lab"),
        ("Received disconnect from 192.0.2.1 port 22:2: Too many authentication failures", "ssh-add"),
        ("Host key verification failed.", "does not know the host key"),
        (
            "Host key for lab has changed and you have requested strict checking.\nHost key verification failed.",
            "WARNING",
        ),
        ("Error: remote port forwarding failed for listen port 4000", "does not listen on port 4000 for us"),
        ("kex_exchange_identification: Connection closed by remote host", "before the login"),
        ("/home/me/.ssh/config: line 3: Bad configuration option: nonsense", "Bad configuration option: nonsense"),
        ("", "it said nothing"),
        (
            f"ssh: connect to host gate port 22: Connection refused\n{CLOSED}",
            "past that one (connect to host gate port 22: Conn",
        ),
        (f"me@gate: Permission denied (publickey).\n{CLOSED}", "past that one (me@gate: Permission denied"),
        (f"ssh: Could not resolve hostname gate: Name or service not known\n{CLOSED}", "leads through a jump host"),
        (
            f"channel 0: open failed: connect failed: Name or service not known\nstdio forwarding failed\n{CLOSED}",
            "the jump host before me@lab accepts the login and does not get through to it (channel 0: open failed",
        ),
    ],
)
def test_each_refusal_has_its_sentence(said: str, words: str) -> None:
    assert words in why_not(said.splitlines(), Asked("me@lab", 4000))


def test_a_refusal_of_any_port_means_that_forwarding_is_forbidden() -> None:
    said = ["Error: remote port forwarding failed for listen port 0"]
    assert "forbids port forwarding" in why_not(said, Asked("lab", 0))


def test_a_changed_key_names_the_line_that_forgets_the_old_one() -> None:
    said = [
        "Host key for [lab]:7 has changed and you have requested strict checking.",
        '  ssh-keygen -f "k" -R "[lab]:7"',
    ]
    told = why_not(said, Asked("lab", 0))
    assert 'ssh-keygen -f "k" -R "[lab]:7"' in told and "Nothing was sent" in told


@given(st.lists(st.text(max_size=80), max_size=8))
def test_whatever_it_says_is_one_line(lines: list[str]) -> None:
    lines = [part for line in lines for part in line.splitlines()]
    told = why_not(lines, Asked("me@lab", 7))
    assert len(told.splitlines()) == 1 and "lab" in told


@pytest.mark.parametrize(
    ("line", "port"),
    [
        ("Allocated port 40361 for remote forward to 127.0.0.1:9999", 40361),
        ("debug1: remote forward success for: listen *:45111, connect 127.0.0.1:9999", 45111),
        ("debug1: remote forward success for: listen *:0, connect 127.0.0.1:9999", 0),
        ("debug1: Remote connections from *:45111 forwarded to local address 127.0.0.1:9999", 0),
    ],
)
def test_the_granted_port_is_read(line: str, port: int) -> None:
    assert forwarded_port(line) == port
    assert is_chatter(line) == line.startswith("debug1")
