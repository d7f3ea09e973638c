"""What the host of this notebook forbids, or cannot do."""

from __future__ import annotations

from guava_nb.tunnels.host import Host, detect_host

__all__ = ["Host", "binder_rule", "colab_rule", "detect_host", "is_loopback"]


def is_loopback(address: str) -> bool:
    """Whether an address, or a name, is that of this very machine."""
    return address in ("localhost", "::1") or address.startswith("127.")


def binder_rule(host: Host) -> str:
    """What Binder lets through, for a user who wants to reach beyond it; an empty string elsewhere."""
    if host is not Host.BINDER:
        return ""
    return (
        "Binder accepts no connection from outside and ends sessions that send much. Use workers on this machine, "
        "%guava_up --local 2; a second notebook of this same Binder session can join too, machines elsewhere cannot."
    )


def colab_rule(host: Host) -> str:
    """What Colab's terms say on workers, where it matters; an empty string elsewhere."""
    if host is not Host.COLAB:
        return ""
    return (
        "Colab's rule: a free runtime (no positive balance of compute units) may not run workers of a distributed "
        "computation and can be ended without warning; with a positive balance it may. "
        "Read https://research.google.com/colaboratory/faq.html before you join."
    )
