"""All that the template of a program is filled with, from the facts of a run."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import torch
from torch import nn

from guava_nb.config.version import installed_version
from guava_nb.export.data_text import data_text, moved
from guava_nb.export.facts import ExportFacts
from guava_nb.export.layout import Layout, classes_are_last, layout_of
from guava_nb.export.loss import loss_text
from guava_nb.export.names import TAKEN, Names
from guava_nb.export.refusals import check_exportable, notes_of
from guava_nb.export.source_text import call, cells_for, define, known_imports, literal
from guava_nb.export.stage_text import StageText
from guava_nb.export.unused import leaves_unused
from guava_nb.protocol.messages import ParallelSpec
from guava_nb.replica.model.build import build_model
from guava_nb.spec.cells import build_module, resolve
from guava_nb.spec.factories import Resolve

__all__ = ["program_text"]

_AUTOCAST = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
_RANDOM = re.compile(
    r"\.(alpha_|feature_alpha_)?dropout(1d|2d|3d)?\(|dropout_p=|\brand|random|bernoulli|multinomial|normal_\(|uniform_\(|augment|noise"
)


def program_text(
    facts: ExportFacts, history: Sequence[Mapping[str, Any]], form: str, path: Path, data: Path | None
) -> tuple[str, Any]:
    """Return the text of a program, and the tensors that go beside it (None without `data`).

    Args:
        facts: of the run.
        history: its steps so far.
        form: "torch", "ray" or "fabric".
        path: where the program will lie.
        data: where the tensors will lie.

    Raises:
        ConfigError: it cannot be exported.
    """
    check_exportable(facts, form)
    return _Program(facts, history, form, path, data).render()


def _sums_replicas(shape: ParallelSpec) -> bool:
    """Whether a program adds up gradients by itself: neither DistributedDataParallel nor FSDP2 wraps the model."""
    return shape.dp > 1 and shape.zero_stage < 2 and (shape.pp > 1 or shape.tp > 1)


class _Program:
    def __init__(
        self, facts: ExportFacts, history: Sequence[Mapping[str, Any]], form: str, path: Path, data: Path | None
    ) -> None:
        self.facts, self.spec, self.form, self.path = facts, facts.spec, form, path
        self.shape = facts.spec.parallel or ParallelSpec(dp=facts.workers)
        self.names = Names(facts.run_id)
        self.loss = loss_text(self.spec, facts.cells, history, facts.loader.record.look)
        place = "" if facts.data is None else self.names.made(facts.data.factory, before=11)
        self.data, self.tensors = data_text(facts, self.names.named, place, data)

    # ------------------------------------------------------------------------------------------------------- the model

    @cached_property
    def model(self) -> nn.Module:
        """A model as workers build it, on the CPU."""
        return build_model(self.spec, self.resolve)

    @cached_property
    def resolve(self) -> Resolve:
        """Finds what the cells define, and what can be imported."""
        shared = build_module(self.facts.cells, "guava_exported") if self.facts.cells else None
        return lambda name: resolve(name, shared)

    @cached_property
    def layout(self) -> Layout:
        shape, model = self.shape, self.model if self.is_spread else nn.Identity()
        return layout_of(model, shape) if self.is_spread else Layout()

    @property
    def is_spread(self) -> bool:
        """Whether the model has to be looked at."""
        shape = self.shape
        return shape.pp > 1 or shape.tp > 1 or shape.zero_stage >= 2 or bool(shape.checkpoint_activations)

    @cached_property
    def classes_last(self) -> bool:
        look = self.facts.loader.record.look
        if not self.loss.classes_last:
            return False
        dtype, shape = look[0]
        inputs = torch.zeros((1, *shape[1:]), dtype=getattr(torch, dtype))
        if self.spec.precision == "fp64" and inputs.is_floating_point():
            inputs = inputs.to(next(self.model.parameters()).dtype)
        return classes_are_last(self.model, inputs, look[1][1])

    # ------------------------------------------------------------------------------------------------ parts of the text

    def optimizer(self) -> dict[str, Any]:
        """The optimizer's call, and the function that makes groups."""
        factory, shape, owner = self.spec.optimizer, self.shape, "stages" if self.shape.pp > 1 else "model"
        is_torchs = hasattr(torch.optim, factory.name)
        name = f"torch.optim.{factory.name}" if is_torchs else self.names.named(factory.name)
        arguments = [f"{key}={literal(value)}" for key, value in factory.args.items()]
        parameters, is_zero1 = f"{owner}.parameters()", shape.zero_stage == 1 and shape.dp > 1
        if is_torchs or self.is_class(factory.name):
            name, given = ("ZeroRedundancyOptimizer", [parameters, name]) if is_zero1 else (name, [parameters])
            return {"optimizer_call": call(name, [*given, *arguments], 16, 4), "function_optimizer": ""}
        made = call(name, ["list(model.named_parameters())", *arguments], 15, 4)
        body = f"return {made}"
        if is_zero1:
            body = (
                f"grouped = {made}\n    return ZeroRedundancyOptimizer(grouped.param_groups, type(grouped), "
                'lr=grouped.defaults["lr"])'
            )
        return {"optimizer_call": f"build_optimizer({owner})", "function_optimizer": body}

    def is_class(self, name: str) -> bool:
        return any(
            isinstance(one, ast.ClassDef) and one.name == name
            for cell in self.facts.cells
            for one in ast.parse(cell.text).body
        )

    def scheduler(self) -> str:
        factory = self.spec.scheduler
        if factory is None:
            return ""
        if not hasattr(torch.optim.lr_scheduler, factory.name):
            return self.names.made(factory, "optimizer", before=16)
        functions = ("lr_lambda", "scale_fn")
        arguments = [
            f"{key}={self._functions(value) if key in functions else literal(value)}"
            for key, value in factory.args.items()
        ]
        return call(f"torch.optim.lr_scheduler.{factory.name}", ["optimizer", *arguments], 16, 4)

    def _functions(self, value: Any) -> str:
        names = [self.names.named(one) for one in ([value] if isinstance(value, str) else value)]
        return names[0] if isinstance(value, str) else f"[{', '.join(names)}]"

    def loss_lines(self) -> dict[str, Any]:
        """What computes loss (and count) of `batch`, or of `inputs` and `targets`."""
        loss, model = self.loss, "parallel" if self.is_ddp and self.form != "fabric" else "model"
        forward = "" if self.shape.pp > 1 else f"outputs = {model}(inputs)"
        given, lines = "outputs, targets", [forward] if forward else []
        if loss.is_step:
            lines, given = [], f"{model}, batch"
        elif self.classes_last:
            lines.append("outputs, targets = outputs.flatten(0, -2), targets.flatten()")
        build = ""
        if loss.is_class:
            build = self._criterion()
            value = f"criterion({given})"
        else:
            name = self.names.named(loss.name)
            value = call(name, [given, *(f"{key}={literal(one)}" for key, one in loss.args.items())])
        if loss.kind == "mean" or (loss.kind == "sum" and hasattr(nn, loss.name)):
            lines.append(f"loss = {value}")
        elif loss.count:
            lines += [f"loss = {value}", f"count = {loss.count}"]
        elif loss.kind == "sum":
            lines.append(f"loss, _ = {value}")
        else:
            lines += [f"loss, count = {value}", "count = torch.as_tensor(count, device=device)"]
        if lines[0] == forward and lines[1:] == [f"loss = {value}"]:
            lines = [f"loss = {value}".replace("outputs", f"{model}(inputs)")]
        moves = loss.is_class and ("torch.tensor" in build or not hasattr(nn, loss.name))
        return {"kind": loss.kind, "build": build, "moves": moves, "lines": lines}

    def _criterion(self) -> str:
        loss, is_torchs = self.loss, hasattr(nn, self.loss.name)
        arguments = []
        for key, value in loss.args.items():
            is_tensor = key in ("weight", "pos_weight") and isinstance(value, list)
            arguments.append(f"{key}=torch.tensor({literal(value)})" if is_tensor else f"{key}={literal(value)}")
        return call(f"nn.{loss.name}" if is_torchs else self.names.named(loss.name), arguments, 16, 4)

    def place_lines(self) -> list[str]:
        """What brings a batch to the device, and treats it there."""
        spec, look = self.spec, self.facts.loader.record.look if self.facts.data is None else [("", ()), ("", ())]
        double = spec.precision == "fp64"
        treats = [f for f in (spec.augment, spec.preprocess) if f is not None]
        is_pair = spec.step is None
        if is_pair and not treats and not double:
            return ["inputs, targets = batch[0].to(device), batch[1].to(device)"]
        if self.facts.data is not None and not is_pair:
            look = None
        lines = [f"batch = {moved(look, double)}"]
        if treats and self.spec.parallel is not None and self.is_random:
            lines.append(f"seed_step(step, -1 - {'replica' if self.shape.dp > 1 else '0'})")
        for number, factory in enumerate(treats):
            target = "inputs, targets" if is_pair and number == len(treats) - 1 else "batch"
            lines.append(f"{target} = {self.names.made(factory, 'batch')}")
        if treats and self.spec.parallel is not None and self.is_random:
            lines.append(f"seed_step(step, {self.seat})")
        return lines + (["inputs, targets = batch"] if is_pair and not treats else [])

    @property
    def seat(self) -> str:
        """What names a part of a step in its seed: ranks that share layers draw the same numbers."""
        replica, stages = ("replica" if self.shape.dp > 1 else ""), self.shape.pp
        if stages == 1:
            return replica or "0"
        return f"replica * {stages} + stage" if replica else "stage"

    @cached_property
    def is_random(self) -> bool:
        """Whether anything draws random numbers in a step."""
        texts = "\n".join(cell.text for cell in self.facts.cells)
        if _RANDOM.search(texts):
            return True
        # Layers with dropout, or a recurrent network's or an attention's.
        is_elsewhere = self.spec.model is not None and ":" in self.spec.model.name
        rates = ("p", "dropout")
        return (is_elsewhere or "dropout" in texts.lower()) and any(
            isinstance(rate := getattr(module, name, 0.0), float) and rate > 0
            for module in self.model.modules()
            for name in rates
        )

    @property
    def keeps_buffers(self) -> bool:
        """Whether replicas may come to buffers of their own."""
        if self.shape.dp == 1 or self.spec.sync_batchnorm:
            return False
        is_elsewhere = self.spec.model is not None and ":" in self.spec.model.name
        if not is_elsewhere and not any(
            re.search("norm|buffer", cell.text, re.IGNORECASE) for cell in self.facts.cells
        ):
            return False
        own = any("register_buffer(" in cell.text for cell in self.facts.cells)
        return self.spec.buffers != "auto" or any(own or buffer.is_floating_point() for buffer in self.model.buffers())

    @property
    def is_ddp(self) -> bool:
        return self.shape.pp == 1 and self.shape.tp == 1 and self.shape.zero_stage < 2

    @property
    def has_unused(self) -> bool:
        """Whether what sums the replicas' gradients is to look for parameters without one."""
        sums = self.is_ddp or _sums_replicas(self.shape)
        return sums and leaves_unused(self.model, self.spec, self.resolve, self.facts.loader.record.look)

    # -------------------------------------------------------------------------------------------------------- the modes

    def mesh(self) -> dict[str, str] | None:
        shape = self.shape
        if shape.pp == 1 and shape.tp == 1:
            return None
        axes = [("dp", f"dist.get_world_size() // {_grouped(self.inner)}")] if shape.dp > 1 else []
        axes += [(name, name.upper()) for name, size in (("pp", shape.pp), ("tp", shape.tp)) if size > 1]
        comma = "," if len(axes) == 1 else ""
        names = ", ".join(f'"{name}"' for name, _ in axes)
        return {"shape": f"({', '.join(size for _, size in axes)}{comma})", "names": f"({names}{comma})"}

    @property
    def inner(self) -> str:
        """How many processes have one replica, as text; "" for one."""
        sizes = (("PP", self.shape.pp), ("TP", self.shape.tp))
        return " * ".join(name for name, size in sizes if size > 1)

    def title(self) -> str:
        shape, forms = self.shape, {"ray": "Ray Train", "fabric": "Lightning Fabric"}
        if self.form in forms:
            return f"data parallel, with {forms[self.form]}"
        words = []
        if shape.pp > 1:
            words.append(f"a pipeline of {self.layout.stages} stages")
        if shape.tp > 1:
            words.append(f"layers split over {shape.tp} processes (DTensor)")
        if shape.dp > 1 and shape.zero_stage >= 2:
            words.append(f"parameters in shards (FSDP2, ZeRO {shape.zero_stage})")
        elif shape.dp > 1 and shape.zero_stage == 1:
            words.append("optimizer state in shards (ZeRO 1)")
        elif shape.dp > 1 or not words:
            words.append("data parallel" if not words else "and replicas of that")
        return ", ".join(words)

    def constants(self) -> list[tuple[str, Any, str]]:
        spec, facts, found = self.spec, self.facts, list[tuple[str, Any, str]]()
        found.append(("SEED", spec.seed, ""))
        found.append(("NUM_EPOCHS", facts.num_epochs, ""))
        if self.data.by_index:
            found.append(("BATCH_SIZE", facts.loader.batch_size, "of all processes together"))
        if facts.accumulation_steps > 1:
            found.append(("ACCUMULATION_STEPS", facts.accumulation_steps, "batches of one optimizer step"))
        if facts.max_steps is not None:
            found.append(("MAX_STEPS", facts.max_steps, ""))
        if spec.max_grad_norm is not None:
            found.append(("MAX_GRAD_NORM", spec.max_grad_norm, ""))
        if self.data.stream_seed is not None or (self.data.order == "stream" and self.data.by_index):
            seed = self.data.stream_seed
            found.append(("ORDER_SEED", "SEED" if seed is None else seed, "of the order of the samples"))
        if self.data.by_index and self.data.order == "seeds":
            found.append(("ORDER_SEEDS", _wrapped(self.data.seeds, 14), "of each epoch's order"))
        if self.shape.tp > 1:
            found.append(("TP", self.shape.tp, "processes that share each layer"))
        if self.shape.pp > 1:
            found.append(("PP", self.shape.pp, "processes that a batch passes"))
            found.append(
                ("MICRO_BATCHES", self.shape.micro_batches, "parts of a batch that are in the pipeline at a time")
            )
            if self.layout.cuts:
                found.append(("CUTS", self.layout.cuts, "layers at which the stages begin"))
            found.append(("NUM_STAGES", "len(CUTS)" if self.layout.cuts else "PP", ""))
        return found

    def stages(self) -> dict[str, Any]:
        """What a pipeline needs beside the rest."""
        if self.shape.pp == 1:
            return {"stage_lines": "", "traced": False}
        makes_groups = bool(self.optimizer()["function_optimizer"])
        return StageText(self.facts, self.shape, self.layout, self.loss_lines(), makes_groups).context()

    # -------------------------------------------------------------------------------------------------------- rendering

    def calls(self) -> dict[str, Any]:
        """Heads and calls of the functions whose parameters depend on the run."""
        spec, shape, owner = self.spec, self.shape, "stages" if self.shape.pp > 1 else "model"
        state = [
            owner,
            "optimizer",
            *(["scheduler"] if spec.scheduler else []),
            *(["scaler"] if spec.precision == "fp16" else []),
        ]
        state += ["parameter_names"] if shape.pp > 1 else []
        types = {
            owner: "nn.Module", "optimizer": "torch.optim.Optimizer", "scheduler": "Any", "scaler": "torch.amp.GradScaler",
            "parameter_names": "list[list[str]]",
        }  # fmt: skip
        parameters = ["path: str", *(f"{name}: {types[name]}" for name in state)]
        saver, done = (["fabric: Fabric"] if self.form == "fabric" else []), "done: tuple[int, int, int]"
        order = "list(range(len(data)))" if self.data.order == "in turn" else "order"
        replicas = ["replica", "replicas"] if shape.dp > 1 else []
        by_index = self.data.by_index
        signature = ["dataset: Dataset", "order: Sequence[int]"] if by_index else ["data: Iterable"]
        signature += ["first: int", *(f"{name}: int" for name in replicas)]
        return {
            "load_head": define("load_checkpoint", parameters, "tuple[int, int, int]"),
            "save_head": define("save_checkpoint", [*saver, *parameters, done], "None"),
            "report_head": define("report", ["metrics: dict[str, Any]", *parameters[1:], done], "None"),
            "state_arguments": ", ".join(state),
            "load_arguments": ", ".join(["resume", *state]),
            "save_arguments": ", ".join([*(["fabric"] if saver else []), "save", *state]),
            "report_arguments": ", ".join(["metrics", *state]),
            "epoch_head": define("epoch_data", signature, "Iterator[tuple[Any, int]]"),
            "epoch_call": ", ".join(["data", *([order] if by_index else []), "batches_done", *replicas]),
        }

    def context(self) -> dict[str, Any]:
        spec, shape, layout, facts = self.spec, self.shape, self.layout, self.facts
        fsdp = shape.dp > 1 and shape.zero_stage >= 2
        mesh, inner, dtensors = self.mesh(), self.inner, fsdp or shape.tp > 1
        return {
            "model_name": spec.model.name.replace(":", ".").rpartition(".")[2] if spec.model else "",
            "title": self.title(), "version": installed_version(), "run_id": facts.run_id, "world": facts.workers,
            "file": self.path.name, "data": self.data, "layout": layout, "form": self.form,
            "constants": self.constants(), "dp": shape.dp > 1, "pp": shape.pp > 1, "tp": shape.tp > 1, "mesh": mesh,
            "ddp": self.is_ddp, "has_unused": self.has_unused, "fsdp": fsdp, "zero1": shape.zero_stage == 1 and shape.dp > 1,
            "dtensors": dtensors, "averages": self.is_ddp or fsdp,
            "sums_replicas": _sums_replicas(shape),
            "fsdp_arguments": (', mesh=mesh["dp"]' if mesh else "")
            + (", reshard_after_forward=False" if shape.zero_stage == 2 else ""),
            "accumulate": facts.accumulation_steps > 1, "clip": spec.max_grad_norm is not None,
            "max_steps": facts.max_steps is not None,
            "is_first": "fabric.is_global_zero" if self.form == "fabric" else "dist.get_rank() == 0",
            "double": spec.precision == "fp64", "bf16": spec.precision == "bf16", "fp16": spec.precision == "fp16",
            "autocast": "" if self.form == "fabric" else _AUTOCAST.get(spec.precision, ""),
            "channels_last": spec.channels_last, "compiles": spec.compile,
            "from_seed": facts.is_from_seed and not spec.pretrained,
            "model_call": self.names.made(spec.model, before=12) if spec.model else "",
            "model_lines": self.model_lines(), **self.optimizer(), **self.calls(), "scheduler_call": self.scheduler(),
            "scheduler_interval": spec.scheduler_interval, "place_lines": self.place_lines(), "loss": self.loss_lines(),
            "seeds_steps": self.is_random, "seed_part": self.seat, **self.draws(), **self.stages(),
            "backward": self.backward, "told": self.told, "summed": self.summed, "clipped": self.clipped(),
            "fixed_world": inner and (f"% {_grouped(inner)}" if shape.dp > 1 else f"!= {inner}"),
            "fixed_text": f"{'a multiple of ' if shape.dp > 1 else ''}{{{inner}}}",
        }  # fmt: skip

    def backward(self, text: str) -> str:
        """Return the call that goes backward from a loss."""
        if self.form == "fabric":
            return f"fabric.backward({text})"
        if self.spec.precision == "fp16":
            return f"scaler.scale({text}).backward()"
        return f"({text}).backward()" if " " in text else f"{text}.backward()"

    def told(self, loss: str) -> str:
        """Return what tells of a step."""
        if self.form == "ray":
            return (
                f'metrics = {{"epoch": epoch + 1, "step": step, "loss": {loss}}}\n'
                '            log.info("epoch %(epoch)d, step %(step)d: loss %(loss).8g", metrics)'
            )
        return f'log.info("epoch %d, step %d: loss %.8g", epoch + 1, step, {loss})'

    def summed(self, name: str) -> str:
        """Return what sums a tensor over the replicas."""
        if self.form == "fabric":
            return f'{name} = fabric.all_reduce({name}, reduce_op="sum")'
        group = ', group=mesh["dp"].get_group()' if self.mesh() else ""
        return f"dist.all_reduce({name}{group})"

    def clipped(self) -> str:
        """Return what clips the gradients."""
        if self.form == "fabric":
            return "fabric.clip_gradients(model, optimizer, max_norm=MAX_GRAD_NORM)"
        if self.shape.tp > 1:
            return "clip_gradients(model.parameters())"
        return "nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)"

    def model_lines(self) -> list[str]:
        spec, found = self.spec, list[str]()
        if spec.frozen:
            found += [
                f"for name in {literal(list(spec.frozen))}:",
                "    model.get_parameter(name).requires_grad_(False)",
            ]
        if spec.sync_batchnorm:
            found.append("model = nn.SyncBatchNorm.convert_sync_batchnorm(model)")
        if spec.deterministic:
            found.append("torch.use_deterministic_algorithms(True)")
        return found

    def draws(self) -> dict[str, bool]:
        texts = "\n".join(cell.text for cell in self.facts.cells)
        return {
            "seeds_python": self.is_random and "import random" in texts,
            "seeds_numpy": self.is_random and bool(re.search(r"\b(np|numpy)\.random", texts)),
        }

    def render(self) -> tuple[str, Any]:
        context = self.context()
        cells = cells_for(self.facts.cells, self.names.used, TAKEN, self.names.imports)
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("guava_nb.export"), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
            undefined=jinja2.StrictUndefined,
        )  # fmt: skip
        template = environment.get_template(f"{self.form}.py.jinja")
        told = notes_of(self.facts, self.shape, self.data, self.is_random, self.keeps_buffers)
        notes = [line for note in told for line in ("", *_filled(note))]
        aliases = sorted(self.names.aliases.items())
        context |= {"aliases": aliases, "notes": notes}
        own = template.render(**context, cells="", imports="")
        self.names.imports.take_all(known_imports(own, cells, self.names.imports))
        text = template.render(**context, cells=cells, imports=self.names.imports.text())
        return re.sub(r"\n{4,}", "\n\n\n", text).rstrip() + "\n", self.tensors


def _grouped(product: str) -> str:
    return f"({product})" if " " in product else product


def _filled(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 116)


def _wrapped(values: Sequence[int], before: int) -> str:
    line = literal(tuple(values))
    return line if len(line) + before <= 90 else "(\n" + "".join(f"    {value},\n" for value in values) + ")"
