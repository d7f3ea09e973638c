"""An ngrok authtoken is found in the promised order, is shown nowhere, and what is none is told before anything starts."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.errors import ConfigError
from guava_nb.tunnels import tokens
from guava_nb.tunnels.host import Host
from guava_nb.tunnels.tokens import VARIABLE, check_token, find_token, token_source
from tests.support.ngrok_agent import TOKEN

OTHER = TOKEN[::-1]


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No token anywhere; returns where ngrok's own configuration would be."""
    conf = pytest.importorskip("pyngrok.conf")
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(conf, "DEFAULT_NGROK_CONFIG_PATH", str(tmp_path / "ngrok.yml"))
    monkeypatch.setattr(conf, "_default_pyngrok_config", conf.PyngrokConfig())
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(tokens, "current_host", lambda: Host.LOCAL)
    return tmp_path / "ngrok.yml"


def test_the_environment_comes_before_the_stored_one(monkeypatch: pytest.MonkeyPatch, nowhere: Path) -> None:
    nowhere.write_text(f"version: '2'\nauthtoken: {OTHER}\n")
    assert find_token().token == OTHER and str(nowhere) in find_token().source
    monkeypatch.setenv(VARIABLE, TOKEN)
    assert find_token().token == TOKEN
    assert token_source() == f"the environment variable {VARIABLE}"
    assert find_token(OTHER).source == "the argument authtoken"
    assert TOKEN not in repr(find_token())


@pytest.mark.parametrize("text", [f"agent:\n  authtoken: {OTHER}\nversion: 3\n", f"authtoken: {OTHER}\n"])
def test_what_ngrok_stored_is_read_and_left_as_it_is(nowhere: Path, text: str) -> None:
    nowhere.write_text(text)
    before = nowhere.stat()
    assert find_token(ask=lambda: pytest.fail("nobody is asked")).token == OTHER
    assert nowhere.read_text() == text and nowhere.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("text", ["authtoken: [", "", "- a\n- b\n", "agent: nothing\n", "authtoken:\n", b"\xff\xfe"])
def test_a_configuration_without_a_token_is_none(nowhere: Path, text: str | bytes) -> None:
    nowhere.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert token_source() == ""
    assert find_token(ask=lambda: TOKEN).source == "the prompt"


def test_what_a_program_told_pyngrok_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyngrok import conf

    monkeypatch.setattr(conf, "_default_pyngrok_config", conf.PyngrokConfig(auth_token=OTHER))
    assert token_source() == "pyngrok's settings in this process"


def test_without_any_the_user_is_asked_once_or_told() -> None:
    assert find_token(ask=lambda: f" {TOKEN}\n").token == TOKEN
    with pytest.raises(ConfigError, match="no authtoken was typed in"):
        find_token(ask=lambda: "  ")
    with pytest.raises(ConfigError, match=f"get one at {tokens.PAGE} and set the environment variable {VARIABLE}"):
        find_token()
    assert token_source() == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f" {TOKEN}", "blanks or quotes around it"),
        (f"{TOKEN}\n", "blanks or quotes around it"),
        (f'"{TOKEN}"', "blanks or quotes around it"),
        (f"'{TOKEN}'", "blanks or quotes around it"),
        (f"ngrok config add-authtoken {TOKEN}", "a whole command"),
        ("guava1:0.tcp.eu.ngrok.io:17234:abcdef", "a join code"),
        ("ak_2abcDEFghiJKLmnoPQRstuVWXyz", "API key"),
        ("cr_2abcDEFghiJKLmnoPQRstuVWXyz", "not the authtoken itself"),
        ("sk-proj-abcdefghijklmnop", "language model"),
        ("hf_abcdefghijklmnopqrst", "Hugging Face"),
        ("https://dashboard.ngrok.com", "an address"),
        ("<token>", "placeholder"),
        ("$NGROK_AUTHTOKEN", "placeholder"),
        ("YOUR_AUTHTOKEN", "placeholder"),
        ("xxxxxxxxxxxxxxxxxxxx", "placeholder"),
        ("2abcDEF", "has 7 characters and cannot be one"),
        ("2abcDEFghiJKLmno PQRstuVWXyz", "cannot be one"),
    ],
)
def test_what_is_obviously_none_is_told_and_not_shown(monkeypatch: pytest.MonkeyPatch, text: str, words: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigError, match=words) as told:
        find_token()
    assert text.strip() not in str(told.value).replace(f"variable {VARIABLE}", "").replace(tokens.PAGE, "")
    with pytest.raises(ConfigError, match=words):
        token_source()


@given(st.from_regex(r"[1-9][A-Za-z0-9]{26}_[A-Za-z0-9]{20,22}", fullmatch=True))
def test_tokens_as_they_are_made_today_pass(text: str) -> None:
    assert check_token(text, "a test") == text


@given(st.text(max_size=80))
def test_any_text_passes_or_is_told_on_one_line(text: str) -> None:
    try:
        assert check_token(text, "a test") == text
    except ConfigError as told:
        assert len(str(told).splitlines()) == 1


# ----------------------------------------------------------------------------------------------------- Colab and Kaggle


class SecretNotFoundError(Exception):
    pass


class NotebookAccessError(Exception):
    pass


class TimeoutException(Exception):  # noqa: N818 (as Colab spells it)
    pass


def on_colab(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    def get(name: str) -> str:
        assert name == VARIABLE
        return str(answer())

    google, colab, userdata = ModuleType("google"), ModuleType("google.colab"), ModuleType("google.colab.userdata")
    userdata.get = get  # type: ignore[attr-defined]
    colab.userdata = userdata  # type: ignore[attr-defined]
    for module in (google, colab, userdata):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(tokens, "current_host", lambda: Host.COLAB)


def fail(problem: Exception) -> Any:
    def raising() -> str:
        raise problem

    return raising


def test_colab_s_secret_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    on_colab(monkeypatch, lambda: TOKEN)
    assert (find_token().token, token_source()) == (TOKEN, "Colab's secrets")


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (SecretNotFoundError(), "Colab has no secret NGROK_AUTHTOKEN"),
        (NotebookAccessError(), "was not granted .* switch its notebook access on"),
        (TimeoutException(), "only in Colab's own page"),
        (RuntimeError(), "failed with RuntimeError"),
    ],
)
def test_colab_s_failures_are_told_apart(monkeypatch: pytest.MonkeyPatch, problem: Exception, words: str) -> None:
    on_colab(monkeypatch, fail(problem))
    with pytest.raises(ConfigError, match=words):
        find_token()
    assert find_token(ask=lambda: TOKEN).source == "the prompt"


def test_colab_may_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    on_colab(monkeypatch, lambda: signal.pause())
    monkeypatch.setattr(tokens, "SECRETS_S", 0.05)
    before = signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(signal, "getitimer", lambda _: (0.0, 0.0))  # pytest-timeout has one of its own
    with pytest.raises(ConfigError, match="did not answer in time"):
        find_token()
    assert signal.getsignal(signal.SIGALRM) is before


def test_colab_is_asked_by_the_main_thread_only(monkeypatch: pytest.MonkeyPatch) -> None:
    on_colab(monkeypatch, lambda: pytest.fail("asked"))
    told: list[str] = []

    def look() -> None:
        with pytest.raises(ConfigError) as problem:
            find_token()
        told.append(str(problem.value))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert "to cells only" in told[0]


def on_kaggle(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    class UserSecretsClient:
        def get_secret(self, name: str) -> str:
            assert name == VARIABLE
            return str(answer())

    module = ModuleType("kaggle_secrets")
    module.UserSecretsClient = UserSecretsClient  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kaggle_secrets", module)
    monkeypatch.setattr(tokens, "current_host", lambda: Host.KAGGLE)


def test_kaggle_s_secret_is_taken_and_its_failures_told(monkeypatch: pytest.MonkeyPatch) -> None:
    on_kaggle(monkeypatch, lambda: TOKEN)
    assert (find_token().token, token_source()) == (TOKEN, "Kaggle's secrets")
    on_kaggle(monkeypatch, fail(ConnectionError("No user secrets exist for kernel id 1 and label NGROK_AUTHTOKEN.")))
    with pytest.raises(ConfigError, match="no secret NGROK_AUTHTOKEN for this notebook .* attach it"):
        find_token()
    on_kaggle(monkeypatch, fail(ConnectionError("Connection error trying to communicate with service.")))
    with pytest.raises(ConfigError, match="internet must be on"):
        find_token()
    never = threading.Event()
    monkeypatch.setattr(tokens, "SECRETS_S", 0.05)
    on_kaggle(monkeypatch, never.wait)
    with pytest.raises(ConfigError, match="did not answer"):
        find_token()
    never.set()
