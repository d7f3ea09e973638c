"""Walks every interleaving of a small run: the real job, exchanges and worker loops, without threads, sockets or clocks.

`python -m tests.support.explorer` walks all configurations; `tests/unit/sync/test_explorer.py` a covering set.
"""
