"""What ngrok's refusals mean for a user of guava_nb, and what to do next. Words only: starts nothing, asks nothing."""

from __future__ import annotations

import json
import re
from typing import Any

from guava_nb.tunnels.tokens import PAGE, VARIABLE

__all__ = ["CODES", "TOKEN_CODES", "blaming", "code_in", "explain", "is_port_in_use", "is_unreachable", "sentence"]

_SIGN_UP = "sign up at https://dashboard.ngrok.com/signup"
_NO_ACCOUNT = "or take a tunnel that needs no account: --tunnel cloudflared"
_TOKEN = f"copy the authtoken again from {PAGE} and set it as {VARIABLE}"
_BILLING = "https://dashboard.ngrok.com/billing"
_SMALLER = "%guava_train --dry-run shows what would send fewer bytes"

#: Meanings as on ngrok.com/docs/errors/err_ngrok_NUMBER, read in August 2026.
CODES: dict[int, str] = {
    103: "the account is suspended: ask support@ngrok.com, " + _NO_ACCOUNT,
    105: f"what was given as authtoken does not look like one: {_TOKEN}",
    107: f"the authtoken was reset, revoked or mistyped: {_TOKEN}",
    108: "the account runs as many agents as its plan allows, often a forgotten one of another notebook or machine: end one "
    "at https://dashboard.ngrok.com/agents and start again",
    120: "the ngrok agent is too old for use without an account: run `ngrok update`, or remove it so that a new one is fetched",
    121: "the ngrok agent is too old for this account: run `ngrok update`, or remove it so that a new one is fetched",
    302: f"TCP tunnels need an account, and no authtoken came through: {_TOKEN}",
    324: "one agent may not carry more endpoints on this account's plan: close other tunnels of this agent, and start again",
    334: "an endpoint with this address is online already: end it at https://dashboard.ngrok.com/endpoints and start again",
    352: f"without an account the number of tunnels is limited: {_SIGN_UP}, {_TOKEN}",
    702: "the limit of new connections a minute was reached: wait a minute; guava_nb opens two for each worker, so look "
    "what else dials this address",
    716: f"without an account the number of connections at a time is limited: {_TOKEN}",
    717: f"without an account the number of new connections is limited: {_TOKEN}",
    718: f"the account's limit of incoming bytes was reached: wait for the next period, see {_BILLING}; {_SMALLER}",
    720: f"the account's limit of outgoing bytes was reached: wait for the next period, see {_BILLING}; {_SMALLER}",
    725: f"the account's bytes of this month are used up: see {_BILLING}, {_NO_ACCOUNT}",
    727: f"the account's HTTP requests of this month are used up: see {_BILLING}, {_NO_ACCOUNT}",
    728: f"the account's HTTP connections of this month are used up: see {_BILLING}, {_NO_ACCOUNT}",
    810: "the agent was shutting down or connecting again: start again in a few seconds",
    3200: "the endpoint is offline: its agent has ended or the address is of yesterday; start the tunnel again and use the new "
    "join code",
    4018: f"the agent has no valid authtoken, and ngrok requires an account: {_SIGN_UP}, {_TOKEN}",
    6022: f"without an account no web pages are served: {_SIGN_UP}, {_TOKEN}",
    6024: "ngrok answered with its page of warning for browsers: nothing is wrong with the tunnel, %guava_worker does not see it",
    8012: "the tunnel is up, but no session listens at its end: it was closed, or its kernel has ended; open it "
    "again with %guava_up",
    8013: "TCP needs a payment card on file, also on the free plan (it is not charged): take --tunnel ngrok-http, which needs no "
    "card, or add one at https://dashboard.ngrok.com/settings#id-verification",
    9040: "ngrok does not serve this machine's address (sanctions, Tor or an anonymising VPN): switch the VPN off, or take "
    "--tunnel ssh:USER@HOST or --tunnel cloudflared",
}

#: Those that another authtoken would mend.
TOKEN_CODES = frozenset({105, 107, 302, 4018})

_CODE = re.compile(r"err[\W_]*ngrok[\W_]*(\d+)(\w?)", re.IGNORECASE)
_UNREACHABLE = re.compile(
    r"no such host|lookup \S+|dial(ing)? (tcp|ngrok)|connection refused|connection reset|i/o timeout|network is unreachable|"
    r"no route to host|context deadline exceeded|remote gone away|failed to send authentication",
    re.IGNORECASE,
)
_INTERCEPTED = re.compile(r"x509|certificate signed by unknown|tls: |proxyconnect", re.IGNORECASE)
_PORT_IN_USE = re.compile(r"address already in use|only one usage of each socket address", re.IGNORECASE)

_TELLING = (_CODE, _UNREACHABLE, _INTERCEPTED, _PORT_IN_USE)


def code_in(text: str) -> int | None:
    """The number of a code anywhere in a text, also in the middle of a word; the last one is what the rest led to."""
    found = None
    for match in _CODE.finditer(text):
        digits = match[1]
        if match[2] and int(digits) not in CODES:  # run into what follows: the longest number that is one
            known = [digits[:n] for n in range(len(digits), 2, -1) if int(digits[:n]) in CODES]
            digits = known[0] if known else digits
        found = int(digits)
    return found


def sentence(code: int, text: str = "") -> str:
    """What a code means and what to do; its own text where it is unknown."""
    told = CODES.get(code) or _line(text) or f"see https://ngrok.com/docs/errors/err_ngrok_{code}"
    return f"{told} (ERR_NGROK_{code})"


def blaming(text: str, source: str) -> str:
    """What `explain` said about a token that ngrok refused, with where that one came from and where a better one goes."""
    place = {
        "the prompt": "type it again",
        "the argument authtoken": "give it as authtoken",
    }.get(source, f"put it where the refused one came from ({source})")
    return text.replace(f"set it as {VARIABLE}", place)


def explain(problem: BaseException, token: str = "", said: str = "") -> str:
    """One line about what stopped a tunnel of ngrok.

    Args:
        problem: from pyngrok, or what the system raised.
        token: is taken out of whatever is shown: ngrok's own messages repeat it.
        said: the agent's last words, for a problem that has none.
    """
    text = _text(problem, said)
    shown = text.replace(token, "(authtoken)") if token else text
    code = code_in(shown)
    if code is not None:
        return f"ngrok opened no tunnel: {sentence(code, shown)}"
    if _PORT_IN_USE.search(shown):
        return (
            "the ngrok agent found its port for its own page taken, three times in a row: something takes ports as fast "
            "as they are free; start again"
        )
    if _INTERCEPTED.search(shown):
        return (
            f"the ngrok agent reaches no ngrok server because a proxy, VPN or virus scanner in between opens its TLS "
            f"({_line(shown)}): switch the VPN or the virus scanner's inspection off, or take --tunnel ssh:USER@HOST"
        )
    if _UNREACHABLE.search(shown):
        return (
            f"the ngrok agent cannot reach ngrok's servers ({_line(shown)}): is there a network, and does a VPN or firewall "
            "let connect.ngrok-agent.com port 443 through? `ngrok diagnose` tells more"
        )
    return f"ngrok opened no tunnel: {_line(shown) or type(problem).__name__}"


def is_port_in_use(problem: BaseException, said: str = "") -> bool:
    """Whether the agent could not listen for its local interface."""
    return bool(_PORT_IN_USE.search(_text(problem, said)))


def is_unreachable(line: str) -> bool:
    """Whether a line of the agent says that it cannot reach its servers."""
    return bool(_UNREACHABLE.search(line) or _INTERCEPTED.search(line))


def _text(problem: BaseException, said: str) -> str:
    """The most precise words there are: the agent's details, its error, a line of its log, or its last words."""
    body = getattr(problem, "body", None)
    if body:
        return _details(str(body))
    error = getattr(problem, "ngrok_error", None)
    if error:
        return str(error)
    lines = [str(getattr(log, "line", "")) for log in getattr(problem, "ngrok_logs", None) or ()]
    telling = [line for line in lines if any(known.search(line) for known in _TELLING)]
    return telling[-1] if telling else said.replace("ERROR:", " ").strip() or str(problem)


def _details(body: str) -> str:
    """The words in the body of a refusal: JSON as a rule, whose details carry them."""
    try:
        held: Any = json.loads(body)
    except ValueError:
        return body
    if not isinstance(held, dict):
        return body
    details = held.get("details")
    words = [held.get("msg"), *(details.values() if isinstance(details, dict) else ())]
    return ": ".join(str(word) for word in words if word) or body


def _line(text: str) -> str:
    """The text on one line, without its code, cut to what one reads."""
    words = " ".join(_CODE.sub(r"\2", text.replace("\\r", " ").replace("\\n", " ")).split()).rstrip(" .:")
    return words if len(words) <= 300 else f"{words[:297]}..."
