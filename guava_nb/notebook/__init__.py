"""The notebook face: IPython magics and a panel over the objects of `guava_nb.orchestrator` and `guava_nb.worker.network_worker`.

Knows IPython and, when there, ipywidgets. Imported only by `%load_ext guava_nb`, never by `import guava_nb`.
"""

from guava_nb.notebook.magics import load, unload

__all__ = ["load", "unload"]
