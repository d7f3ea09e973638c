"""Entry of a worker process of the matrix: `guava_nb.worker.process` itself, with the injection put around its methods first."""

import runpy

from tests.faults.matrix.injection import install, wait_at_gate

if __name__ == "__main__":
    install()
    wait_at_gate()
    runpy.run_module("guava_nb.worker.process", run_name="__main__", alter_sys=True)
