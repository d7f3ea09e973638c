"""Where an ngrok authtoken comes from: the environment, the host's secrets, ngrok's own settings, a hidden prompt.

Knows where to look and what is no token. Shows a token nowhere and writes none.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guava_nb.errors import ConfigError
from guava_nb.tunnels.host import Host, current_host

__all__ = ["PAGE", "VARIABLE", "Found", "check_token", "find_token", "token_source"]

#: The environment variable, and the name of the secret in Colab and Kaggle.
VARIABLE = "NGROK_AUTHTOKEN"
PAGE = "https://dashboard.ngrok.com/get-started/your-authtoken"
#: Seconds that a host's secrets may take: Colab waits for a click when the notebook was not granted the secret.
SECRETS_S = 30.0

_COLAB = "Colab's secrets"
_KAGGLE = "Kaggle's secrets"
#: What is pasted instead of an authtoken, by how it begins.
_OTHER_THINGS = {
    "guava": "a join code: that goes to %guava_worker on the other machine",
    "ak_": "the id of an ngrok API key, which is not an authtoken",
    "cr_": "the id of an ngrok authtoken, not the authtoken itself",
    "sk-": "an API key of a language model",
    "hf_": "a token of Hugging Face",
    "ghp_": "a token of GitHub",
    "github_pat_": "a token of GitHub",
    "AIza": "an API key of Google",
    "http": "an address",
    "tcp:": "an address",
}
_PLACEHOLDER = re.compile(r"your|token|paste|here|example|x{4}|\*{3}|\.{3}|[<>$\[\]{}]", re.IGNORECASE)


@dataclass(frozen=True)
class Found:
    """An authtoken and where it came from.

    Attributes:
        token: is never shown, by `repr` neither.
        source: in words, as in "the token came from ...".
    """

    token: str = field(repr=False)
    source: str


def find_token(given: str | None = None, ask: Callable[[], str] | None = None) -> Found:
    """Find an authtoken: the given one, then the environment, the host's secrets, ngrok's settings, then `ask`.

    Raises:
        ConfigError: there is none, or the first one found is obviously something else.
    """
    notes: list[str] = []
    for source, look in _places(given):
        text = look(notes)
        if text:
            return Found(check_token(text, source), source)
    if ask is None:
        raise ConfigError(_nothing(notes))
    answer = ask().strip()
    if not answer:
        raise ConfigError(f"no authtoken was typed in; copy yours from {PAGE} and start again")
    return Found(check_token(answer, "the prompt"), "the prompt")


def token_source() -> str:
    """Name where `find_token` would take a token from without asking the user; "" where it would find none.

    Raises:
        ConfigError: what stands there is obviously no authtoken.
    """
    notes: list[str] = []
    for source, look in _places(None):
        text = look(notes)
        if text:
            check_token(text, source)
            return source
    return ""


def check_token(text: str, source: str) -> str:
    """Return the token, if it can be one; ngrok's servers have the last word.

    Raises:
        ConfigError: it is obviously something else; the text itself is not shown.
    """
    who = f"the ngrok authtoken from {source}"
    if text != text.strip() or (text[:1] in "'\"" and text[:1] == text[-1:]):
        raise ConfigError(f"{who} has blanks or quotes around it: give it without them")
    if "authtoken" in text.lower() and " " in text:
        raise ConfigError(f"{who} is a whole command: give only the token at its end, as on {PAGE}")
    for start, thing in _OTHER_THINGS.items():
        if text.lower().startswith(start.lower()):
            raise ConfigError(f"{who} is {thing}; copy the authtoken from {PAGE}")
    if _PLACEHOLDER.search(text) and len(text) < 40:
        raise ConfigError(f"{who} is a placeholder from an example; copy your own from {PAGE}")
    if not re.fullmatch(r"[A-Za-z0-9_-]{16,200}", text):
        raise ConfigError(
            f"{who} has {len(text)} characters and cannot be one: they have about 50 letters, digits and one _; "
            f"copy it from {PAGE}"
        )
    return text


# ------------------------------------------------------------------------------------------------------ where they are

#: Gives what stands there, or None; a sentence on what to do there goes into the list.
_Look = Callable[[list[str]], "str | None"]


def _places(given: str | None) -> Iterator[tuple[str, _Look]]:
    yield "the argument authtoken", lambda _: given
    yield f"the environment variable {VARIABLE}", lambda _: os.environ.get(VARIABLE)
    host = current_host()
    if host is Host.COLAB:
        yield _COLAB, _from_colab
    if host is Host.KAGGLE:
        yield _KAGGLE, _from_kaggle
    yield "pyngrok's settings in this process", _from_pyngrok
    for path in _config_paths():
        yield f"ngrok's configuration {path}", lambda notes, path=path: _from_config(path, notes)  # type: ignore[misc]


def _from_colab(notes: list[str]) -> str | None:
    """Colab answers to the main thread only, tells three failures apart, and may wait for ever."""
    if threading.current_thread() is not threading.main_thread():
        notes.append("Colab gives its secrets to cells only, not to other threads")
        return None
    try:
        from google.colab import userdata  # type: ignore[import-not-found, import-untyped, unused-ignore]

        with _at_most(SECRETS_S):
            return str(userdata.get(VARIABLE))
    except Exception as problem:  # the classes are Colab's own, and differ between its versions
        notes.append(_COLAB_SAYS.get(type(problem).__name__, f"Colab's secrets failed with {type(problem).__name__}"))
        return None


_COLAB_SAYS = {
    "SecretNotFoundError": f"Colab has no secret {VARIABLE} (the key symbol at the left: add it there)",
    "NotebookAccessError": f"this notebook was not granted Colab's secret {VARIABLE} (the key symbol at the left: "
    "switch its notebook access on)",
    "TimeoutException": "Colab's secrets did not answer in time (they do only in Colab's own page, not in an editor)",
    "_TookTooLong": "Colab's secrets did not answer in time (they do only in Colab's own page, not in an editor)",
}


class _TookTooLong(Exception):
    """The time for an answer is over."""


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Break off what the main thread waits for; where there are no such signals, it waits."""
    if not hasattr(signal, "setitimer") or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield  # on Windows, or when another timer runs already
        return

    def ring(*_: Any) -> None:
        raise _TookTooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _from_kaggle(notes: list[str]) -> str | None:
    """Kaggle asks its server, whose own deadline is minutes; so a thread does, and may be left behind."""
    answer: list[str] = []
    problems: list[str] = []

    def ask() -> None:
        try:
            from kaggle_secrets import UserSecretsClient  # type: ignore[import-not-found, unused-ignore]

            answer.append(str(UserSecretsClient().get_secret(VARIABLE)))
        except Exception as problem:  # the classes are Kaggle's own
            problems.append(str(problem))

    thread = threading.Thread(target=ask, name="kaggle-secrets", daemon=True)
    thread.start()
    thread.join(SECRETS_S)
    if answer:
        return answer[0]
    if problems and "No user secrets" in problems[0]:
        notes.append(f"Kaggle has no secret {VARIABLE} for this notebook (Add-ons > Secrets: add it and attach it)")
    else:
        notes.append("Kaggle's secrets did not answer (the notebook's internet must be on)")
    return None


def _from_pyngrok(_: list[str]) -> str | None:
    """What a program set in pyngrok, which is loaded then."""
    conf: Any = sys.modules.get("pyngrok.conf")
    return None if conf is None else conf.get_default().auth_token


def _config_paths() -> list[Path]:
    """Where `ngrok config add-authtoken` stores, here and in older versions."""
    try:
        from pyngrok import conf
    except ImportError:
        return []
    paths = [conf.get_default().config_path, conf.DEFAULT_NGROK_CONFIG_PATH, Path.home() / ".ngrok2" / "ngrok.yml"]
    return [found for found in dict.fromkeys(Path(path) for path in paths if path) if found.is_file()]


def _from_config(path: Path, notes: list[str]) -> str | None:
    """Read, never written: it is the user's own."""
    import yaml

    try:
        held = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as problem:
        notes.append(f"{path} cannot be read ({type(problem).__name__})")
        return None
    agent = held.get("agent") if isinstance(held, dict) else None
    token = agent.get("authtoken") if isinstance(agent, dict) else None
    token = token or (held.get("authtoken") if isinstance(held, dict) else None)
    return str(token) if token else None


def _nothing(notes: list[str]) -> str:
    tried = f" ({'; '.join(notes)})" if notes else ""
    anywhere = f"; the environment variable {VARIABLE} works too"
    keep = {
        Host.COLAB: f"add a secret {VARIABLE} under the key symbol at the left and switch its notebook access on{anywhere}",
        Host.KAGGLE: f"add a secret {VARIABLE} under Add-ons > Secrets and attach it to this notebook{anywhere}",
    }.get(
        current_host(),
        f"set the environment variable {VARIABLE} before Jupyter or Python starts, or run %guava_up where a notebook can ask",
    )
    return (
        f"ngrok needs an authtoken, and none was found{tried}: get one at {PAGE} and {keep}. "
        "A tunnel that needs no account is --tunnel cloudflared"
    )
