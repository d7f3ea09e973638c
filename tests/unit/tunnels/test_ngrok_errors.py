"""What ngrok's refusals mean: a sentence for each code, however the code is written, and never the token."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.tunnels.ngrok_errors import CODES, blaming, code_in, explain, is_port_in_use, sentence
from tests.support.ngrok_agent import TOKEN

exceptions = pytest.importorskip("pyngrok.exception")

WANTED = (
    105,
    107,
    108,
    120,
    121,
    302,
    324,
    334,
    352,
    702,
    716,
    717,
    718,
    720,
    727,
    810,
    3200,
    4018,
    6022,
    8012,
    8013,
    9040,
)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("the prompt", "and type it again"),
        ("ngrok's configuration /home/a/ngrok.yml", "(ngrok's configuration /home/a/ngrok.yml)"),
    ],
)
def test_a_refused_token_is_named_by_its_source(source: str, words: str) -> None:
    for code in (105, 107, 302, 4018):
        told = blaming(sentence(code), source)
        assert words in told and "NGROK_AUTHTOKEN" not in told and code_in(told) == code


def at_start(text: str) -> Exception:
    error: Exception = exceptions.PyngrokNgrokError(f"The ngrok process errored on start: {text}.", [], text)
    return error


def at_create(details: Any, status: int = 502) -> Exception:
    body = json.dumps({"error_code": 103, "status_code": status, "msg": "failed to start tunnel", "details": details})
    error: Exception = exceptions.PyngrokNgrokHTTPError("returned", "http://x/api/tunnels", status, "Bad", {}, body)
    return error


@pytest.mark.parametrize("code", WANTED)
def test_every_code_has_a_sentence_with_a_step(code: int) -> None:
    told = explain(at_start(f"authentication failed: words of theirs\\r\\n\\r\\nERR_NGROK_{code}\\r\\n"))
    assert told == f"ngrok opened no tunnel: {CODES[code]} (ERR_NGROK_{code})"
    assert told == explain(at_create({"err": f"words of theirs\r\n\r\nERR_NGROK_{code}\r\n"}))
    assert "\n" not in told and len(told) < 360
    steps = (
        "copy",
        "end ",
        "run ",
        "remove",
        "wait",
        "see ",
        "take ",
        "start ",
        "sign up",
        "open it",
        "close",
        "switch",
    )
    assert any(step in told for step in steps)


def test_without_a_card_the_other_tunnel_is_proposed_by_name() -> None:
    assert "--tunnel ngrok-http, which needs no card" in CODES[8013]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("ERR_NGROK_108", 108),
        ("tunnel 5d8a-ERR_NGROK_8013f2a1.ngrok.io not found", 8013),
        ("xERR_NGROK_324ab", 324),
        ("err-ngrok-702", 702),
        ("(ERR\\_NGROK\\_302)", 302),
        ("ERR_NGROK_81234", 81234),
        ("https://ngrok.com/docs/errors/err_ngrok_4018", 4018),
        ("first ERR_NGROK_810, then ERR_NGROK_108", 108),
        ("ngrok says nothing of the kind", None),
    ],
)
def test_a_code_is_found_however_it_is_written(text: str, code: int | None) -> None:
    assert code_in(text) == code


def test_an_unknown_code_has_its_own_words() -> None:
    told = explain(at_create({"err": "Your account did\r\nsomething new.\r\n\r\nERR_NGROK_9999\r\n"}))
    assert told == "ngrok opened no tunnel: failed to start tunnel: Your account did something new (ERR_NGROK_9999)"
    assert sentence(9999) == "see https://ngrok.com/docs/errors/err_ngrok_9999 (ERR_NGROK_9999)"
    assert explain(at_create("strange")) == "ngrok opened no tunnel: failed to start tunnel"
    assert explain(at_create({})) == "ngrok opened no tunnel: failed to start tunnel"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dial tcp: lookup connect.ngrok-agent.com: no such host", "cannot reach ngrok's servers"),
        ("failed to dial ngrok server: dial tcp 3.1.2.3:443: i/o timeout", "VPN or firewall"),
        ("tls: failed to verify certificate: x509: certificate signed by unknown authority", "inspection off"),
        ("listen tcp 127.0.0.1:4040: bind: address already in use", "found its port for its own page taken"),
    ],
)
def test_the_network_is_told_from_a_refusal(text: str, words: str) -> None:
    assert words in explain(at_start(text))
    quiet = exceptions.PyngrokNgrokError("The ngrok process was unable to start.", [SimpleNamespace(line=text)])
    assert words in explain(quiet), "the last telling line of its log"
    assert words in explain(
        exceptions.PyngrokNgrokError("The ngrok process was unable to start."), said=f"ERROR:  {text}\n"
    )
    assert is_port_in_use(at_start(text)) == ("address already" in text)


@given(st.text(max_size=60), st.text(max_size=60), st.sampled_from([None, 105, 107, 9999]), st.booleans())
def test_the_token_is_in_no_sentence(before: str, after: str, code: int | None, create: bool) -> None:
    text = f"{before}Your authtoken: {TOKEN} {after}" + (f"\nERR_NGROK_{code}" if code else "")
    told = explain(at_create({"err": text}) if create else at_start(text), TOKEN)
    assert TOKEN not in told
    assert len(told.splitlines()) == 1
