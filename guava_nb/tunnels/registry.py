"""From the text `NAME[:WHAT]` to a tunnel: ours by name, other packages' by entry point.

A class is imported when it is named, so that a tunnel never needs what another one is built on.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from guava_nb.config.values import near
from guava_nb.errors import ConfigError, GuavaError
from guava_nb.tunnels.direct import DirectTunnel, LocalTunnel
from guava_nb.tunnels.tunnel import Tunnel

__all__ = ["GROUP", "make_tunnel", "split_host", "tunnel_names"]

#: Entry points of this group name classes of tunnels; see `Tunnel` for what their constructors take.
GROUP = "guava_nb.tunnels"

#: Asks for an ngrok authtoken by hidden prompt; None where no person can be asked.
Ask = Callable[[], str]


def make_tunnel(text: str, ask: Ask | None = None) -> Tunnel:
    """Make the tunnel that a text such as `ngrok`, `direct:lab.example:7000` or `ssh:me@host` names; starts nothing.

    Args:
        text: `NAME[:WHAT]`; names as in `tunnel_names`.
        ask: gives an authtoken where a tunnel needs one and finds none; None where no person can be asked.

    Raises:
        ConfigError: no tunnel has that name, or it cannot do with what stands behind the colon.
    """
    name, _, what = text.strip().partition(":")
    name, what = name.strip(), what.strip()
    if name in _OURS:
        return _OURS[name](what, ask)
    for entry in _theirs():
        if entry.name == name:
            return _load(entry, what)
    known = tunnel_names()
    raise ConfigError(f'no tunnel is called "{name}".{near(name.lower(), known)} There are: {", ".join(known)}')


def tunnel_names() -> list[str]:
    """Names of all tunnels that `make_tunnel` knows: ours, then other packages' in alphabetical order."""
    return [*_OURS, *sorted({entry.name for entry in _theirs()} - set(_OURS))]


def split_host(text: str, example: str = "HOST:PORT") -> tuple[str, int | None]:
    """Take `HOST[:PORT]` apart; an IPv6 address stands in brackets, and comes back without them.

    Raises:
        ConfigError: no host, no number between 1 and 65535, or an IPv6 address without brackets.
    """
    if "://" in text:
        raise ConfigError(
            f"{text!r} is an address of the web: write it without {text.split('://')[0]}://, as {example}"
        )
    bracketed = text.startswith("[")
    host, closing, rest = text[1:].partition("]") if bracketed else (*text.partition(":")[:1], "", "")
    if not bracketed and text.count(":") > 1:
        raise ConfigError(f"{text} looks like an IPv6 address: write it in brackets, as in [{text}] or [{text}]:7000")
    tail = rest if bracketed else text[len(host) :]
    if not host or (bracketed and not closing) or (tail and not tail.startswith(":")):
        raise ConfigError(f"{text!r} is not of the form {example}")
    if not tail:
        return host, None
    if not (tail[1:].isascii() and tail[1:].isdigit() and 1 <= int(tail[1:]) <= 65535):
        raise ConfigError(f"{tail[1:]!r} in {text!r} is no port: it must be a number from 1 to 65535, as in {example}")
    return host, int(tail[1:])


# ---------------------------------------------------------------------------------------------------------------- ours


def _local(what: str, _: Ask | None) -> Tunnel:
    if what:
        raise ConfigError(f'the tunnel "local" takes nothing after the colon, and got "{what}"')
    return LocalTunnel()


def _direct(what: str, _: Ask | None) -> Tunnel:
    return DirectTunnel(*split_host(what, "direct:HOST[:PORT]")) if what else DirectTunnel()


def _class(module: str, name: str) -> Any:
    return getattr(import_module(f"guava_nb.tunnels.{module}"), name)


_OURS: dict[str, Callable[[str, Ask | None], Tunnel]] = {
    "local": _local,
    "direct": _direct,
    "ngrok": lambda what, ask: _class("ngrok", "NgrokTunnel")(what, ask=ask),
    "ngrok-http": lambda what, ask: _class("ngrok", "NgrokHttpTunnel")(what, ask=ask),
    "cloudflared": lambda what, _: _class("cloudflared", "CloudflaredTunnel")(what),
    "ssh": lambda what, _: _class("ssh", "SshTunnel")(what),
}

# -------------------------------------------------------------------------------------------------------------- theirs


def _theirs() -> list[EntryPoint]:
    return list(entry_points(group=GROUP))


def _load(entry: EntryPoint, what: str) -> Tunnel:
    """Make another package's tunnel.

    Raises:
        ConfigError: it cannot be imported or made, or is no tunnel; the message names the package.
    """
    package = entry.dist.name if entry.dist is not None else entry.module
    try:
        made = entry.load()(what)
    except GuavaError:
        raise  # its own sentence
    except Exception as problem:  # whatever another package's import may raise
        raise ConfigError(
            f'the tunnel "{entry.name}" of the package {package} cannot be used: {type(problem).__name__}: '
            f"{' '.join(str(problem).split())}; update or uninstall {package}"
        ) from problem
    if not isinstance(made, Tunnel):
        raise ConfigError(
            f'the tunnel "{entry.name}" of the package {package} is a {type(made).__name__}, not a guava_nb.tunnels.Tunnel; '
            f"update or uninstall {package}"
        )
    return made
