"""Checks of what tunnels need: tokens and programs. A machine that only joins needs none of it, so nothing here fails."""

from __future__ import annotations

import re
import shutil
import subprocess

from guava_nb.doctor.check import Check, installed
from guava_nb.errors import ConfigError

__all__ = ["check_cloudflared", "check_ngrok", "check_ngrok_token", "check_pyngrok", "check_ssh"]

_VERSION_S = 10.0


def check_ngrok_token() -> Check:
    """Where an authtoken would be taken from; never what it is."""
    from guava_nb.tunnels.tokens import PAGE, VARIABLE, token_source

    try:
        source = token_source()
    except ConfigError as problem:
        return Check("ngrok token", "warning", str(problem), f"copy the token again from {PAGE}")
    if not source:
        return Check("ngrok token", "-", f"none here; only `%guava_up --tunnel ngrok` needs one ({VARIABLE})")
    return Check("ngrok token", "ok", f"there, from {source}; whether ngrok takes it shows at the start of a tunnel")


def check_pyngrok() -> Check:
    """Whether the right one of two packages with nearly one name is here."""
    ours, other = installed("pyngrok"), installed("ngrok")
    if ours is None:
        confused = f' (the package "ngrok" {other} is another one)' if other else ""
        return Check(
            "pyngrok", "warning", f"not installed{confused}: no ngrok tunnels", "python -m pip install pyngrok"
        )
    beside = f'; the package "ngrok" {other} is another one, and not used' if other else ""
    return Check("pyngrok", "ok", f"{ours}{beside}")


def check_ngrok() -> Check:
    """The agent that would run, and its version."""
    from guava_nb.tunnels.agent_program import agent_version, find_agent

    try:
        path = find_agent()
        if path is None:
            return Check("ngrok agent", "-", "none here; the first start fetches one")
        return Check("ngrok agent", "ok", f"{agent_version(path)} at {path}")
    except ConfigError as problem:
        return Check("ngrok agent", "warning", str(problem), "no ngrok tunnels until that is mended")


def check_cloudflared() -> Check:
    """The program of the tunnel without an account."""
    from guava_nb.tunnels.cloudflared_program import VERSION, find_cloudflared

    missing = f"none here; the first `%guava_up --tunnel cloudflared` fetches version {VERSION}"
    return _program("cloudflared", find_cloudflared(), "--version", missing)


def check_ssh() -> Check:
    """The system's own ssh."""
    return _program("ssh", shutil.which("ssh"), "-V", "none here; `%guava_up --tunnel ssh:HOST` needs OpenSSH's client")


def _program(name: str, path: str | None, flag: str, missing: str) -> Check:
    if path is None:
        return Check(name, "-", missing)
    try:
        done = subprocess.run(
            [path, flag], capture_output=True, text=True, timeout=_VERSION_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return Check(name, "warning", f"{path} does not run: {problem}", "install it again")
    told = re.search(r"\d+(?:\.\d+)+\w*", done.stdout + done.stderr)
    return Check(name, "ok", f"{told[0] if told else 'unknown version'} at {path}")
