"""Imported by the server of `multiprocessing` from which pools of ranks are forked, see `warm.context`."""

import gc

from tests.support.warm import PRELOADED, preload

preload(PRELOADED)
gc.freeze()  # or collections would write into every page, and nothing would stay shared
