"""The process group `"guava"` of torch.distributed, through a hub; importing registers it. Knows no step and no model."""

from __future__ import annotations

from guava_nb.backend.endpoint import Endpoint
from guava_nb.backend.init_group import end_group, init_group, register
from guava_nb.backend.store import store_for

__all__ = ["Endpoint", "end_group", "init_group", "store_for"]

register()
