"""Names of a program: its own, and those of the user's things that it calls.

Knows where each comes from: a shared cell, or a module to import.
"""

from __future__ import annotations

from guava_nb.errors import ConfigError
from guava_nb.export.source_text import Imports, call, literal
from guava_nb.protocol.messages import Factory

__all__ = ["TAKEN", "Names"]

#: Names that programs have for their own.
TAKEN = frozenset(
    ("build_data", "orders", "share", "epoch_data", "grouped", "seed_step", "stage_of", "clip_gradients", "whole", "part",
     "local", "by_name", "load_checkpoint", "save_checkpoint", "split_layers", "build_optimizer", "train", "main", "log", "SEED",
     "NUM_EPOCHS", "BATCH_SIZE", "ACCUMULATION_STEPS", "MAX_STEPS", "MAX_GRAD_NORM", "ORDER_SEED", "ORDER_SEEDS", "NUM_STAGES",
     "MICRO_BATCHES", "CUTS", "PP", "TP", "report")
)  # fmt: skip
#: Variables of its functions: what is called so outside gets a second name.
_LOCALS = frozenset(
    ("args", "arguments", "batch", "batches", "batches_done", "block", "children", "config", "count", "counts", "criterion",
     "data", "dataset", "device", "epoch", "epochs", "example", "fabric", "factor", "first", "first_epoch", "found",
     "gradient", "group", "grouped", "has_rows", "index", "inputs", "is_last", "kept", "kind", "last", "layer", "loss",
     "loss_of_step", "loss_sum", "losses", "made", "mean", "mesh", "metrics", "micro_batches", "model", "name", "neighbours",
     "norm", "number", "optimizer", "order", "outputs", "own", "parallel", "parameter", "parser", "parts", "pipe",
     "plan", "replica", "replicas", "resume", "rows", "save", "saved", "scaler", "schedule", "schedule_for",
     "scheduler", "seed", "stage", "stages", "state", "step", "step_rows", "sums", "targets", "trainer", "weight",
     "weights")
)  # fmt: skip


class Names:
    """The user's names in one program.

    Args:
        run_id: of the run, for messages.

    Attributes:
        imports: of what can be imported.
        used: names of shared cells.
        aliases: second names of what the program has variables for, each to its first.
    """

    def __init__(self, run_id: str) -> None:
        """Nothing is named yet."""
        self._run_id = run_id
        self.imports, self.used, self.aliases = Imports(), set[str](), dict[str, str]()

    def named(self, name: str) -> str:
        """Return how the program calls something of the user's, and remember where it comes from."""
        module, colon, path = name.rpartition(":")
        first = path.partition(".")[0]
        if not colon:
            self.used.add(first)
        elif module == "guava_nb" or module.startswith("guava_nb."):
            raise ConfigError(
                f"{self._run_id} cannot be exported: {name} is a part of guava_nb, which is not there when the program runs"
            )
        else:
            self.imports.add(f"from {module} import {first}")
        if first in _LOCALS:
            self.aliases[f"shared_{first}"] = first
            return f"shared_{path}"
        return path

    def made(self, factory: Factory, *first: str, before: int = 0, indent: int = 4, prefix: str = "") -> str:
        """Return the call of a factory with its arguments."""
        name = f"{prefix}{factory.name}" if prefix else self.named(factory.name)
        return call(name, [*first, *(f"{key}={literal(value)}" for key, value in factory.args.items())], before, indent)
