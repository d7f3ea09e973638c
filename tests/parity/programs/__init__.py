"""Training programs as users write them, and the table of what each comes to in each mode.

`python -m tests.parity.programs -h` says how to print the table; `tests/parity/test_programs.py` runs a part of it.
"""
