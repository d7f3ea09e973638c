"""What a program says of a pipeline: its stages, the loss of a micro-batch, and torch's schedule over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from guava_nb.errors import ConfigError
from guava_nb.export.facts import ExportFacts
from guava_nb.export.layout import Layout
from guava_nb.export.source_text import call, literal
from guava_nb.protocol.messages import ParallelSpec

__all__ = ["StageText"]

_SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}


@dataclass(frozen=True)
class StageText:
    """The lines of a pipeline.

    Args:
        facts, shape, layout: of the run.
        loss: kind and lines of its loss.
        makes_groups: a function of the user's makes the optimizer.
    """

    facts: ExportFacts
    shape: ParallelSpec
    layout: Layout
    loss: dict[str, Any]
    makes_groups: bool

    def context(self) -> dict[str, Any]:
        """Return what the template needs.

        Raises:
            ConfigError: the stages get batches of several shapes, and the model is traced for one.
        """
        lines = [
            'stage, neighbours = mesh.get_local_rank("pp"), mesh["pp"].get_group()',
            "is_last = stage == neighbours.size() - 1",
            f"parameter_names = {self._order}",
            *self._stages(),
            *self._loss_sum(),
        ]
        if not self.layout.cuts and not self.has_one_shape:
            raise ConfigError(
                f"{self.facts.run_id} cannot be exported: torch traces a model that is no nn.Sequential for one shape of "
                "micro-batches, and this run's batches have several: make their number divide by micro_batches and replicas, and "
                "give the loader drop_last=True; or make the model an nn.Sequential of its blocks"
            )
        lines += self._schedule()
        return {
            "stage_lines": "\n".join(f"    {line}" if line else "" for line in lines),
            "traced": not self.layout.cuts,
        }

    @property
    def has_one_shape(self) -> bool:
        """Whether all micro-batches of all replicas have as many rows."""
        loader = self.facts.loader
        if loader.batch_size is None or loader.batch_size % (self.shape.dp * self.shape.micro_batches):
            return False
        return loader.drop_last or (loader.samples is not None and loader.samples % loader.batch_size == 0)

    @property
    def _order(self) -> str:
        if self.makes_groups:
            return "by_name(build_optimizer(model), model)  # of the whole model's optimizer, for checkpoints"
        return "[[name for name, _ in model.named_parameters()]]  # of the whole model, for checkpoints"

    def _stages(self) -> list[str]:
        layout = self.layout
        if layout.cuts and self.shape.stages_per_rank == 1:
            return ["stages = stage_of(model, stage)"]
        if layout.cuts:
            return [
                "parts = {index: stage_of(model, index) for index in range(stage, NUM_STAGES, PP)}",
                "children = [child for part in parts.values() for child in part.named_children()]",
                "stages = nn.Sequential(OrderedDict(children))",
            ]
        if self.shape.tp > 1:
            raise ConfigError(
                f"{self.facts.run_id} cannot be exported: torch's tracing does not follow layers that are split over processes: "
                "make the model an nn.Sequential of its blocks"
            )
        dtype, shape = self.facts.loader.record.look[0]
        if self.facts.spec.precision == "fp64" and "float" in dtype:
            dtype = "float64"
        rows = "BATCH_SIZE" if self.facts.loader.by_index else str(self.facts.loader.batch_size)
        rows += " // (replicas * MICRO_BATCHES)" if self.shape.dp > 1 else " // MICRO_BATCHES"
        example = ", ".join(map(str, (rows, *shape[1:])))
        split = [f"{literal(name)}: SplitPoint.BEGINNING" for name in layout.begins]
        return [
            "# Torch traces the model with a micro-batch, and all others must have its shape.",
            f"example = torch.zeros({example}, dtype=torch.{dtype}, device=device)",
            f"pipe = pipeline(model, (example,), split_spec={{{', '.join(split)}}})",
            "stages = pipe.get_stage_module(stage)",
        ]

    def _loss_sum(self) -> list[str]:
        kind, lines = self.loss["kind"], list(self.loss["lines"])
        last = lines.pop()
        head = "def loss_sum(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:"
        found = [*(["counts: list[torch.Tensor] = []", ""] if kind == "count" else [""]), head]
        found.append('    """Return the loss of a micro-batch as a sum: sums of any sizes add up."""')
        if kind == "count":
            body = [*lines, last, "counts.append(count.to(loss.dtype))", "return loss"]
        elif kind == "mean" and lines:
            body = ["rows = len(targets)", *lines, f"return {last.removeprefix('loss = ')} * rows"]
        elif kind == "mean":
            body = [f"return {last.removeprefix('loss = ')} * len(targets)"]
        else:
            body = [*lines, last, "return loss"]
        return [*found, *(f"    {line}" for line in body), ""]

    def _schedule(self) -> list[str]:
        shape = self.shape
        name = _SCHEDULES[shape.schedule if shape.stages_per_rank > 1 or shape.schedule != "interleaved" else "gpipe"]
        if name == "Schedule1F1B" and shape.micro_batches < self.layout.stages:
            name = "ScheduleGPipe"  # torch refuses the other, which would do the same
        if not self.layout.cuts:
            return [*self._made(), self._called(name, "MICRO_BATCHES", 11, 4)]
        kind = name
        lines = [
            "@cache",
            "def schedule_for(rows: int) -> Any:",
            '    """Return the schedule for batches of so many rows: all micro-batches of one have the same size."""',
            "    micro_batches = gcd(rows, MICRO_BATCHES)",
            *(f"    {line}" for line in self._made()),
        ]
        if name == "Schedule1F1B":
            lines.append("    kind = Schedule1F1B if micro_batches >= NUM_STAGES else ScheduleGPipe")
            kind = "kind"
        returned = self._called(kind, "micro_batches", 15, 8).replace("schedule = ", "return ", 1)
        return [*lines, f"    {returned}", ""]

    def _made(self) -> Sequence[str]:
        if not self.layout.cuts:
            return ["made = pipe.build_stage(stage, device, neighbours)"]
        if self.shape.stages_per_rank == 1:
            return ["made = PipelineStage(stages, stage, NUM_STAGES, device, group=neighbours)"]
        return [
            "made = [PipelineStage(part, index, NUM_STAGES, device, group=neighbours) for index, part in parts.items()]"
        ]

    def _called(self, name: str, count: str, before: int, indent: int) -> str:
        return f"schedule = {call(name, ['made', count, 'loss_fn=loss_sum', 'scale_grads=False'], before, indent)}"
