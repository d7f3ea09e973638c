"""Ways to make a listening port reachable from outside: each gives the address that a join code carries. Knows no message."""

from guava_nb.tunnels.cloudflared import CloudflaredTunnel
from guava_nb.tunnels.direct import DirectTunnel, LocalTunnel
from guava_nb.tunnels.ngrok import NgrokHttpTunnel, NgrokTunnel
from guava_nb.tunnels.registry import make_tunnel, tunnel_names
from guava_nb.tunnels.tunnel import LOOPBACK, Address, Tunnel

__all__ = [
    "LOOPBACK",
    "Address",
    "CloudflaredTunnel",
    "DirectTunnel",
    "LocalTunnel",
    "NgrokHttpTunnel",
    "NgrokTunnel",
    "Tunnel",
    "make_tunnel",
    "tunnel_names",
]
