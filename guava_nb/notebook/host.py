"""What the host of this notebook forbids."""

from __future__ import annotations

from guava_nb.tunnels.host import Host, detect_host

__all__ = ["Host", "colab_rule", "detect_host"]


def colab_rule(host: Host) -> str:
    """What Colab's terms say on workers, where it matters; an empty string elsewhere."""
    if host is not Host.COLAB:
        return ""
    return (
        "Colab's rule: a free runtime (no positive balance of compute units) may not run workers of a distributed "
        "computation and can be ended without warning; with a positive balance it may. "
        "Read https://research.google.com/colaboratory/faq.html before you join."
    )
