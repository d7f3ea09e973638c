"""Every setting of a session, from code, environment, `.env` and YAML, checked before anything starts.

Knows names, types, units and ranges; knows nothing of torch, sockets or notebooks.
"""

from guava_nb.config.modes import MODE_DEFAULTS, MODES, SCHEDULES, check_plan, mode_settings
from guava_nb.config.settings import DistributedConfig

__all__ = ["MODES", "MODE_DEFAULTS", "SCHEDULES", "DistributedConfig", "check_plan", "mode_settings"]
