"""Imported by the server of `multiprocessing` from which pools of ranks are forked, see `warm.context`."""

from tests.support.warm import PRELOADED, preload, preload_ours

preload(PRELOADED)
preload_ours()
