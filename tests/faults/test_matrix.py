"""The fault matrix: what each fault at each phase in each mode comes to is what was written down; a covering set of cells.

The whole is printed by `python -m tests.faults.matrix`; see tests/README.md.
"""
