"""What of a run no plain program can do, and what this one does otherwise, in sentences."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from torch import nn, optim
from torch.optim import lr_scheduler

from guava_nb.errors import ConfigError
from guava_nb.export.data_text import DataText
from guava_nb.export.facts import ExportFacts
from guava_nb.protocol.messages import Cell, Factory, ParallelSpec, RunSpec

__all__ = ["check_exportable", "notes_of"]

_OWN = dir(nn.Module)
_GRADIENT_HOOK = re.compile(r"\.register_(hook|post_accumulate_grad_hook)\(")


def check_exportable(facts: ExportFacts, form: str) -> None:
    """Refuse a run that a program in this form would not repeat.

    Raises:
        ConfigError: why, and what to do.
    """
    reasons = (*_of_the_run(facts.spec), *_of_the_optimizer(facts))
    for reason in (facts.refused, *reasons, *_of_the_form(facts, form), *_of_the_data(facts)):
        if reason:
            raise ConfigError(f"{facts.run_id} cannot be exported: {reason}")
    _refuse_inner_use(facts.spec, facts.cells)


def _of_the_run(spec: RunSpec) -> Iterator[str]:
    parallel = spec.parallel
    if spec.model is None or any(f is not None and f.name.startswith("@") for f in (spec.model, spec.optimizer)):
        yield "its model lives in the worker's own process, and no program here builds it"
    if spec.rounds is not None:
        yield (
            "it takes local steps between two exchanges (sync='local'), and torch has no such loop of its own: train with "
            "sync='step'"
        )
    if parallel is not None and parallel.gather:
        yield "its code calls gather_batch of guava_nb: write the exchange with torch.distributed.nn.functional.all_gather"
    if _follows_validation(spec):
        assert spec.scheduler is not None
        yield (
            f"its schedule ({spec.scheduler.name}) follows the validations, and the program has none: choose one that follows "
            "steps or epochs"
        )
    spreads = parallel is not None and (parallel.zero_stage >= 2 or parallel.tp > 1 or parallel.pp > 1)
    if spec.precision == "fp16" and spreads:
        yield (
            "torch.amp.GradScaler looks at the gradients of one process, and this run's model lies in parts on several: use "
            "precision bf16"
        )
    if parallel is not None and parallel.mode == "hybrid" and parallel.zero_stage == 1 and parallel.dp > 1:
        yield (
            "torch's ZeroRedundancyOptimizer does not go with layers or stages on several processes: use --zero 0, which gives "
            "the same losses, or --zero 2 with --tp"
        )
    if parallel is not None and parallel.pp > 1 and (spec.augment is not None or spec.preprocess is not None):
        yield "preprocess and augment need whole batches, and a stage has inputs or targets only: let the data set do it"


def _of_the_optimizer(facts: ExportFacts) -> Iterator[str]:
    parallel = facts.spec.parallel
    is_made_anew = parallel is not None and parallel.zero_stage == 1 and parallel.dp > 1
    is_own = not hasattr(
        optim, facts.spec.optimizer.name
    )  # else no shared cell makes it, and none has hooks on its steps
    if is_made_anew and is_own and any(".register_step_p" in cell.text for cell in facts.cells):
        yield (
            "torch's ZeroRedundancyOptimizer makes the optimizer anew, without the hooks that a cell registers on its steps: "
            "use data mode, or --zero 2"
        )


def _follows_validation(spec: RunSpec) -> bool:
    if spec.scheduler is None:
        return False
    found = getattr(lr_scheduler, spec.scheduler.name, None)
    return spec.scheduler_interval == "validation" or found is lr_scheduler.ReduceLROnPlateau


def _of_the_form(facts: ExportFacts, form: str) -> Iterator[str]:
    if form == "torch":
        return
    name = {"ray": "Ray Train", "fabric": "Lightning Fabric"}[form]
    parallel, spec = facts.spec.parallel, facts.spec
    if parallel is not None and parallel.mode != "data":
        yield (
            f"the form {form!r} says data mode only, and this run is of mode {parallel.mode}: {name} would run the program of "
            "--form torch as it is"
        )
    if spec.precision == "fp16" and form == "fabric":
        yield "fp16 in Lightning Fabric hides its loss scale, so a run could not go on from a checkpoint: use bf16"


def _of_the_data(facts: ExportFacts) -> Iterator[str]:
    loader = facts.loader
    if facts.data is None and loader.record.look is None:
        yield "it has drawn no batch yet, so what its data is like is not known: export it after its first step"
    if not loader.by_index and loader.cuts_otherwise:
        yield (
            f"its batches are cut in a way of their own ({loader.reading}), which no slice of rows says: let the collate "
            "function put the samples on the first axis of every part"
        )


def _refuse_inner_use(spec: RunSpec, cells: Sequence[Cell]) -> None:
    """Refuse a step that reads parts of the model: DistributedDataParallel hides them, and does not see such calls."""
    is_wrapped = spec.parallel is None or (spec.parallel.mode in ("data", "zero") and spec.parallel.zero_stage < 2)
    function = _function(spec.step, cells) if is_wrapped and spec.step is not None else None
    if function is None or not function.args.args:
        return
    model = function.args.args[0].arg
    for node in ast.walk(function):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name) or node.value.id != model:
            continue
        if node.attr not in _OWN:
            raise ConfigError(
                f"step {function.name!r} uses {model}.{node.attr}, and torch sums gradients only of what the model's own forward "
                "computes: let forward() do it, and call the model in the step"
            )


def _function(factory: Factory, cells: Sequence[Cell]) -> ast.FunctionDef | None:
    for cell in reversed(cells):
        for statement in ast.parse(cell.text).body:
            if isinstance(statement, ast.FunctionDef) and statement.name == factory.name:
                return statement
    return None


def notes_of(
    facts: ExportFacts, shape: ParallelSpec, data: DataText, is_random: bool, keeps_buffers: bool
) -> list[str]:
    """Return paragraphs for the program's head on what is not as in the run.

    Args:
        facts, shape: of the run.
        data: what the program reads, and how.
        is_random: something draws random numbers in a step.
        keeps_buffers: replicas may come to buffers of their own.
    """
    spec, threads = facts.spec, facts.spec.threads or 1
    buffers = {"auto": "the mean", "average": "the mean", "sum": "the sum"}.get(spec.buffers, f"buffers={spec.buffers}")
    told = {
        "The run did not begin from its seed: give the weights from which it began with --weights, or a checkpoint with "
        "--resume.": not facts.is_from_seed or spec.pretrained,
        "The run shuffled with a generator that had given out numbers before: this program begins it anew, so its samples come "
        "in another order.": data.is_other_order,
        f"{facts.loader.collate} is called with each process's part of a batch: where it mixes samples, the batches are others "
        "than in the run.": data.collates_parts,
        "Hooks on a parameter's gradient get that of each process, and in the run that of the whole batch.": any(
            _GRADIENT_HOOK.search(cell.text) for cell in facts.cells
        ),
        f"The run sent {'what passed between stages' if shape.pp > 1 else 'gradients'} as {spec.wire}; here it all travels in "
        "full.": spec.wire != "fp32",
        f"Buffers that training changes (running statistics) became {buffers} of all workers' in the run; here each process has "
        "its own, and those of the first are saved.": keeps_buffers,
        "The optimizer, which the run had at the orchestrator, is on every process here; the numbers are the "
        "same.": spec.optimizer_site == "orchestrator",
        f"The run gave each worker {threads} threads: set OMP_NUM_THREADS, which torchrun sets to 1.": threads > 1,
        "Random numbers (dropout) on split layers and stages differ from those of the run.": (
            is_random and (shape.tp > 1 or shape.pp > 1)
        ),
        f"Left out, which the run had: {', '.join(facts.left_out)}.": facts.left_out,
        "SyncBatchNorm of torch needs GPUs.": spec.sync_batchnorm,
    }
    return [sentence for sentence, holds in told.items() if holds]
