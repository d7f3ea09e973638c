"""What a `.env` or `config.yaml` of the current folder must not set without a notice: the folder may be a stranger's."""

from __future__ import annotations

from guava_nb.config.settings import DistributedConfig
from guava_nb.config.sources import OF_THE_FOLDER
from guava_nb.config.values import Origin

__all__ = ["folder_notice", "folder_risks"]


def folder_risks(config: DistributedConfig, of_a_worker: bool = False) -> dict[str, Origin]:
    """Return the settings by which a file of the current folder weakens security or starts a program, each with where it stands.

    `tls` off, a `tunnel`, `workers_on`, a `master_ip` that others reach, a `session_file`, whose secret and key the session
    takes, and the `path` "direct", on which nothing is encrypted.

    Args:
        config: of the session.
        of_a_worker: that listens; then only `tls`, `tunnel`, and a `gpu_host` that others reach.
    """
    host = "gpu_host" if of_a_worker else "master_ip"
    risky = {"tls": not config.tls, "tunnel": config.tunnel, host: _is_reached_by_others(getattr(config, host))}
    if not of_a_worker:
        risky |= {
            "workers_on": config.workers_on,
            "session_file": config.session_file not in ("", "off"),
            "path": config.path == "direct",
        }
    found = {name: config.origin(name) for name, is_risky in risky.items() if is_risky}
    return {name: origin for name, origin in found.items() if origin.endswith(OF_THE_FOLDER)}


def folder_notice(config: DistributedConfig, of_a_worker: bool = False) -> str:
    """Return a sentence on what `folder_risks` finds; "" where it finds nothing."""
    if not (risks := folder_risks(config, of_a_worker)):
        return ""
    told = ", ".join(f"{name} ({origin})" for name, origin in risks.items())
    return (
        f"set by a file of the current folder: {told}. It weakens this session's security or starts a program: "
        "take it out of the file if you did not want it"
    )


def _is_reached_by_others(host: str) -> bool:
    return host not in ("", "localhost", "::1") and not host.startswith("127.")
