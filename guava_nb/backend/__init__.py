"""Registers the process group `"guava"` with torch.distributed; see the room's README."""

from __future__ import annotations

from guava_nb.backend.endpoint import Endpoint
from guava_nb.backend.init_group import end_group, init_group, register
from guava_nb.backend.store import store_for

__all__ = ["Endpoint", "end_group", "init_group", "store_for"]

register()
