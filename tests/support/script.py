"""`python -m tests.support.script FILE ARGUMENT ...` is `python FILE ARGUMENT ...` in a process that `warm` forks."""

import os
import runpy
import sys

if __name__ == "__main__":
    sys.argv[:] = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
