"""What ssh says, as a sentence with a next step. Pure: lines in, text out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["FORWARDING_REFUSED", "Asked", "forwarded_port", "is_chatter", "refused_forwarding", "why_not"]

_ALLOCATED = re.compile(r"Allocated port (\d+) for remote forward")
_FORWARDED = re.compile(r"remote forward success for: listen .*?:(\d+), connect ")
#: In what ssh says when the server lets us in and does not want to listen for us.
FORWARDING_REFUSED = "remote port forwarding failed"
_CHATTER = (
    "debug", "Warning: Permanently added", "Pseudo-terminal will not", "Authenticated to ", "OpenSSH_", "Transferred: ",
    "Bytes per second: ",
)  # fmt: skip


class Asked(NamedTuple):
    """What ssh was asked for: the destination as the user named it, and the remote port, 0 for any."""

    target: str
    port: int


def forwarded_port(line: str) -> int:
    """The remote port that is forwarded from now on, 0 when the line says nothing of it."""
    found = _ALLOCATED.search(line) or _FORWARDED.search(line)
    return int(found[1]) if found else 0


def is_chatter(line: str) -> bool:
    """Whether a line says nothing about what went wrong."""
    return not line.strip() or line.startswith(_CHATTER)


def refused_forwarding(lines: Sequence[str]) -> bool:
    """Whether the server let us in and did not want to listen for us."""
    return any(FORWARDING_REFUSED in line for line in lines)


def why_not(lines: Sequence[str], asked: Asked) -> str:
    """Say why ssh ended, and what to do."""
    text = "\n".join(lines)
    for mark, sentence in _SENTENCES:
        if re.search(mark, text, re.IGNORECASE):
            return sentence(text, asked)
    said = next((line.strip() for line in reversed(lines) if not is_chatter(line)), "it said nothing")
    return f"ssh to {asked.target} ended: {said[:300]} (try it by hand: ssh {asked.target})"


def _changed(text: str, asked: Asked) -> str:
    found = re.search(r"^\s*(ssh-keygen .*-R .*?)\s*$", text, re.MULTILINE)
    forget = found[1] if found else f"ssh-keygen -R {_host(asked)}"
    return (
        f"WARNING: {asked.target} shows another host key than the one known here: either it was set up anew, or another "
        f"machine is in between. Nothing was sent. Ask its administrator; if the new key is right, remove the old one ({forget}) "
        f"and run {_meet(asked)}"
    )


def _unknown(text: str, asked: Asked) -> str:
    return (
        f"ssh does not know the host key of {asked.target} yet: run {_meet(asked)} once here (in a notebook with ! in front), "
        "and compare the fingerprint it shows with the one its owner gives"
    )


def _no_name(text: str, asked: Asked) -> str:
    return (
        f"ssh finds no machine called {_host(asked)}: check the spelling, the Host entries of ~/.ssh/config, and whether this "
        "machine is online"
    )


def _refused(text: str, asked: Asked) -> str:
    return (
        f"{asked.target} is there, and its ssh port does not answer ({_line(text, 'refused')}): check that its ssh server "
        "runs; if it uses another port than 22, give it a Host entry with Port in ~/.ssh/config and name that entry"
    )


def _silent(text: str, asked: Asked) -> str:
    return (
        f"{asked.target} did not answer in time ({_line(text, 'timed out|unreachable|no route')}): a firewall, a VPN, or the "
        "machine is off; try ssh from a terminal of this machine"
    )


def _denied(text: str, asked: Asked) -> str:
    return (
        f"{asked.target} accepts none of the keys that ssh has here ({_line(text, 'denied|too many auth')}), and no "
        f"password can be typed here: make a key (ssh-keygen) and put it there (ssh-copy-id {asked.target}), load it into "
        "ssh-agent if it has a passphrase (ssh-add), or name user and IdentityFile in ~/.ssh/config"
    )


def _forbidden(text: str, asked: Asked) -> str:
    if asked.port:
        return (
            f"{asked.target} does not listen on port {asked.port} for us: another program has it, or it is below 1024; take "
            f"another port, or none (--tunnel ssh:{asked.target}), then a free one is taken. It is "
            "the port that workers dial; that of the SSH server itself goes into ~/.ssh/config (a Host entry with Port)"
        )
    return (
        f"{asked.target} accepts the login and forbids port forwarding: its administrator must allow it (AllowTcpForwarding yes "
        "in its sshd_config, no restrict or no-port-forwarding before the key in authorized_keys); else take another host"
    )


def _closed(text: str, asked: Asked) -> str:
    return (
        f"{asked.target} closed the connection before the login ({_line(text, 'kex_|banner|closed|reset')}): it is too "
        "busy, refuses this machine's address, or no ssh server answers there; try again in a minute"
    )


def _beyond_jump(text: str, asked: Asked) -> str:
    return (
        f"the jump host before {asked.target} accepts the login and does not get through to it ({_line(text, 'open failed')}): "
        "check HostName and Port of its Host entry in ~/.ssh/config, which are as the jump host sees them, and its ssh server"
    )


def _at_jump(text: str, asked: Asked) -> str:
    said = next((line.removeprefix("ssh: ").strip()[:160] for line in text.splitlines() if not is_chatter(line)), "")
    return (
        f"the way to {asked.target} leads through a jump host (ProxyJump or ProxyCommand in ~/.ssh/config), and ssh does not "
        f"get past that one ({said}): make ssh to the jump host itself work first, by hand"
    )


_SENTENCES: tuple[tuple[str, Callable[[str, Asked], str]], ...] = (
    (r"HOST IDENTIFICATION HAS CHANGED|Host key for .* has changed", _changed),
    (r"channel \d+: open failed[^\n]*\n\s*stdio forwarding failed", _beyond_jump),
    (r"UNKNOWN port 65535", _at_jump),
    (r"Host key verification failed", _unknown),
    (r"Could not resolve hostname", _no_name),
    (FORWARDING_REFUSED, _forbidden),
    (r"Permission denied \(|Too many authentication failures", _denied),
    (r"connect to .*refused", _refused),
    (r"timed out|unreachable|no route to host", _silent),
    (r"kex_exchange_identification|banner exchange|Connection (closed|reset) by", _closed),
)


def _meet(asked: Asked) -> str:
    return f"ssh -o StrictHostKeyChecking=accept-new {asked.target} exit"


def _host(asked: Asked) -> str:
    return asked.target.rpartition("@")[2]


def _line(text: str, mark: str) -> str:
    """The line that matched, for those who know ssh."""
    found = next((line for line in text.splitlines() if re.search(mark, line, re.IGNORECASE)), "")
    return found.removeprefix("ssh: ").strip()[:160]
