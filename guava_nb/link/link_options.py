"""From the user's configuration to the settings of the lower rooms."""

from __future__ import annotations

from guava_nb.config import DistributedConfig
from guava_nb.link.options import LinkOptions
from guava_nb.transport.options import SocketOptions

__all__ = ["link_options"]


def link_options(config: DistributedConfig) -> LinkOptions:
    """Return the link settings of a configuration."""
    return LinkOptions(
        heartbeat_s=config.heartbeat_s,
        silence_s=config.silence_s,
        grace_s=config.grace_s,
        connect_timeout_s=config.connect_timeout_s,
        window_bytes=config.window_mb << 20,
        compression=config.compression,
        socket=SocketOptions(buffer_bytes=int(config.socket_buffer_mb * (1 << 20)) or None),
    )
