"""The options of a training run, each written once.

`Orchestrator.start_training` and `forecast`, the line of `%guava_train` with its help and its completion, and the record
that travels to the workers derive from the fields here. Knows no torch: a notebook reads it before torch is loaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from guava_nb.config import DistributedConfig
from guava_nb.config.units import parse_seconds
from guava_nb.errors import ConfigError
from guava_nb.spec.factories import near
from guava_nb.spec.round_options import SPARSE_METHODS, check_rounds, filled

if TYPE_CHECKING:
    from typing_extensions import Self  # of Python 3.11

__all__ = [
    "LOSSES",
    "MEASURED",
    "OF_SESSION",
    "Kind",
    "OptionInfo",
    "Reference",
    "TrainingOptions",
    "listed",
    "option",
    "option_infos",
    "same_named",
    "takes_options",
]

#: What stands for a model, a loss or another function: its name, or the object itself.
Reference = str | Callable[..., Any] | type

#: What values an option takes. "name" stands for a `Reference`, "arguments" for its keyword arguments.
Kind = Literal[
    "name", "arguments", "metrics", "choice", "whole", "count", "seed", "norm", "size", "weights", "switch", "file",
    "words", "function", "objects", "policies", "text", "period", "several",
]  # fmt: skip

#: Value of `resume` for the last run of a session whose process ended.
OF_SESSION = "session"
#: Value of `shares` that follows the pace of the workers.
MEASURED = "measured"
#: What most people use of torch; any other name is as good.
LOSSES = ("CrossEntropyLoss", "MSELoss", "BCEWithLogitsLoss", "L1Loss", "SmoothL1Loss", "NLLLoss", "KLDivLoss")
_OPTIMIZERS = ("AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adadelta", "Adamax")
_SCHEDULERS = ("CosineAnnealingLR", "StepLR", "MultiStepLR", "OneCycleLR", "LinearLR", "ExponentialLR", "LambdaLR",
               "ReduceLROnPlateau", "CosineAnnealingWarmRestarts")  # fmt: skip
_PRECISIONS = ("fp32", "bf16", "fp16", "fp64", "auto")


@dataclass(frozen=True, kw_only=True)
class OptionInfo:
    """One option, for those who show it, read it from a line or check it.

    Attributes:
        name, default, text: of the field, and what the docstring of its class says of it.
        kind: what values it takes.
        choices: the values themselves, where there are few.
        setting: what the configuration calls the value to take where none is given.
        flag: the word after `--` on a line of `%guava_train`; "" where no line can say it, and `unsayable` tells why.
        known: names of torch that most people use; any other is as good.
        needs: the word of the line without which this one would mean nothing there.
    """

    name: str = ""
    default: Any = None
    text: str = ""
    kind: Kind
    choices: tuple[str, ...] = ()
    setting: str = ""
    flag: str = ""
    unsayable: str = ""
    known: tuple[str, ...] = ()
    needs: str = ""


def option(default: Any, kind: Kind, **facts: Any) -> Any:
    """Declare a field of the options; `facts` as for `OptionInfo`."""
    return field(default=default, metadata={"facts": OptionInfo(kind=kind, **facts)})


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """All options of a run beside its data loaders. Checked when made; `settled` fills in the configuration's values.

    A new option is a field, a sentence below, and the code that uses it.

    Attributes:
        num_epochs: passes over the data; with a checkpoint to resume counted from the very beginning; by default the
            configuration's, 1.
        max_steps: optimizer steps after which the run ends, in mid-epoch too; with a checkpoint to resume counted from the very
            beginning. Without num_epochs it takes as many passes as it needs.
        val_interval: optimizer steps between validations; by default after each epoch, and at the end of the run.
        detach: return at once; %guava_status shows the run, %guava_stop (run.stop()) ends it.
        criterion: loss(outputs, targets) for batches (inputs, targets): a torch criterion or a shared function.
        criterion_args: keyword arguments of a torch criterion; class weights as a list or a tensor.
        step: instead of a criterion, for batches of any form: a shared function(model, batch) that returns the loss.
        optimizer: a torch.optim class, or a shared function of the named parameters.
        optimizer_args: keyword arguments of the optimizer. What they leave out is the configuration's learning_rate and
            weight_decay if it sets them, else torch's own: lr 0.001 (AdamW, Adam, SGD, RAdam), 0.002 (NAdam, Adamax), 0.01
            (RMSprop, Adagrad), 1.0 (Adadelta); weight_decay 0.01 (AdamW), else 0.
        scheduler: a torch.optim.lr_scheduler class, or a shared function of the optimizer; by default the learning rate stays.
        scheduler_args: keyword arguments of the scheduler.
        scheduler_interval: what the scheduler counts; by default the configuration's.
        scheduler_metric: what a scheduler such as ReduceLROnPlateau follows: "loss" of the validation (without one, of the
            epoch), its "accuracy" (with mode "max"), or one of `metrics`; by default "loss".
        max_grad_norm: largest global L2 norm of the gradients; 0: no clipping; by default the configuration's, none.
        accumulation_steps: loader batches per optimizer step, which takes the mean over all their samples, also where the last
            ones are fewer or smaller; by default the configuration's.
        sync: when workers exchange what they learned: "step" sums the gradients of every step, and equals training on one
            machine; "local" lets each worker take `sync_every` steps on its own part of the batches and then takes one common
            step, which sends that much less over slow lines and is another algorithm (DiLoCo, local SGD). Data mode at the hub.
            "auto" measures lines and steps before the run, takes "step" where the line costs less than a quarter of the
            computing, else the shortest rounds in which workers wait for it a tenth of the time, with a sync_delay as long as
            an exchange takes and wire int4, or outer "partial" in runs of 4,000 steps and more (a wire that is given stays),
            and says what it chose.
        sync_every: optimizer steps of a round of local sync; by default 30.
        outer: what the workers' mean pseudo-gradient goes into: "nesterov" (DiLoCo), "average", the mean of their weights,
            "sparse" (SparseLoCo), which sends the largest 1/64 of each pseudo-gradient at 2 bits and the rest with later rounds,
            or "partial", which sends as much, leaves the rest in the worker's own weights and takes of each element the mean of
            those who sent it: measured, it trains best at few bytes in long runs. By default average.
        outer_lr: learning rate of that common step; of nesterov 0.7 by default, of partial 1.4 in rounds of 15 steps and more
            that send 1/32 of the elements or less, else 1.
        outer_momentum: momentum of nesterov, below 1; by default 0.9.
        outer_args: of sparse and partial: density, the part that is sent (above 0, up to 1), by default 1/64; bits of each
            value (1, 2, 4, 8, 32), by default 2. Of sparse also decay, how much of what was left out counts a round later (0 to
            1), by default 0.95.
        sync_delay: local steps that a worker goes on with its own weights before it takes the common ones of the round before,
            so that it computes while these travel; below sync_every. What these steps came to is kept. By default 0: it waits
            for them. A worker alone waits for nothing, and trains as without.
        mixing: how much of its own weights a worker keeps then, from 0 to below 1, as in Streaming DiLoCo (0.5 there, for
            delays that are short beside a round). By default it keeps what its steps came to since it sent.
        precision: arithmetic of forward and backward; "auto" takes bf16 where the device of every worker computes it by itself,
            else fp32; by default the configuration's.
        compile: compile the model on the workers (torch.compile): the first steps take longer, the others less time. It needs
            Triton there on a GPU, and a C++ compiler on a CPU.
        channels_last: keep images and convolutions in the memory format that tensor cores prefer.
        seed: root of all random numbers of the run; by default the configuration's.
        shares: relative share of each worker, in the order they joined, one for each that is here; a worker that joins later gets
            the least of them, and where none is left that had a share, one worker does it all. By default equal ones. With
            local sync "measured" lets a faster worker take more local steps in a round, by its pace in the rounds before; the
            numbers then depend on that pace.
        buffers: what becomes of a buffer that workers change by different amounts: "average" by samples, "first" takes those of
            the first samples, "sum" adds changes up, as of counts; or by name, as in "vq.*=first,hist=sum". Statistics of
            normalisation layers are always averaged. By default "auto": what the one-step check finds to be that of the whole
            batch; else whole numbers that count samples are added up, others averaged, and it is told where that need not be
            right.
        optimizer_site: who holds the optimizer, "orchestrator" for an authoritative master copy; by default the configuration's.
        wire: how the gradients of several workers, or what their local steps came to, travel by way of the orchestrator, and
            their sum back: "fp32" exactly (float64 too), "bf16" or "fp16" in half of the bytes, "int8" in a quarter, "int4"
            in an eighth. What a message leaves out is sent with the next one (error feedback). In a pipeline: how activations and
            their gradients pass from stage to stage, each rounded for itself. In data mode and with stages only; the run is
            then near to plain PyTorch, not equal to it.
        callbacks: objects of this process with any of on_step, on_epoch, on_validation (see help(guava_nb.Callback)); in a
            line their names, with commas. With an on_step a lone worker waits for the commit of each step.
        batch: how batches are read, where it is not plain, in the words in which the status tells it, such as "cut: image,
            label; cut on axis 1: frames; one per sample: boxes; whole: anchors". What it does not name is read as usual.
        split_fn: splits a batch into row ranges where no words fit: function(batch, ranges) that returns one part per
            (start, stop).
        preprocess: shared function(batch), run on the workers' devices for every batch of training and validation, so that
            data travels in the dtype it has (uint8 images, say) and becomes floats there.
        augment: shared function(batch), run there before it, in training only; what it draws depends on seed, step and share
            alone.
        metrics: of the validations, beside loss and accuracy; as for `validate` and %guava_validate.
        cache: where workers keep the samples they got, within `worker_cache_mb` of the configuration, so that later epochs
            send only those that changed; by default the configuration's `worker_cache`.
        cache_static: samples do not change between epochs: those that workers hold are not loaded again. Without it every
            sample is loaded and compared.
        data: "worker" where `train_loader` is a `WorkerData`.
        tokens: shared function(batch) that returns the number of tokens of a batch as the model gets it, for joules per token
            in %guava_energy (run.energy_record()).
        count_flops: count floating point operations, for the share of a device's peak in %guava_energy (data mode); by default
            the configuration's.
        threads: torch's threads in each worker; by default the configuration's, none: torch's own choice.
        budget_bytes: most bytes to send and receive here, before encryption, such as 900MB: the run stops before, between two
            steps, with a checkpoint to go on from. By default the configuration's; 0 sets no limit. What workers exchange
            directly does not count.
        save_path: where that checkpoint goes; by default a name is made in `checkpoint_dir`.
        save_every: steps (500) or time (10min) between checkpoints, which are written to `checkpoint_dir` while training goes
            on, under names with run, time and step; by default the configuration's save_interval, 0: none.
        checkpoint_dir: folder of what a run writes by itself: checkpoints and logs; by default the configuration's,
            ./checkpoints.
        save_best: figure of the validation, such as accuracy or loss, after whose best value so far a checkpoint is written to
            the same folder; of a metric of your own with its better direction, as in f1:max or error:min.
        patience: end the run after so many validations in a row that were no better, by the figure of save_best or by the loss;
            by default it goes on.
        keep: how many of the checkpoints of save_every stay, the newest ones; by default all.
        log: where steps, validations and epochs are logged while the run goes on, one or several of them, as in csv,tensorboard:
            loss, metrics, learning rate, samples a second, joules. Files go to `checkpoint_dir`, under
            names with run and time; wandb and mlflow take the run that the notebook has begun, or begin one. By default none.
        check: before the first step that several workers share, one of them computes a batch whole and in pieces. "warn"
            tells where they differ (a loss that couples samples, batch statistics), "strict" refuses, "off" does not look.
        weights: start from the weights in a file: a state dict of torch.save, .safetensors, a folder of those, or a checkpoint,
            of which only the weights are taken; or hf:NAME[@REVISION], which each machine fetches from the Hugging Face hub
            itself. By default as the model is built, or registered.
        save_only: "trainable" leaves frozen parameters out of checkpoints, which have their digests instead: to go on from one,
            build, register or give (weights) the same frozen part.
        resume: go on from a checkpoint, at its place in its epoch; "session": from what workers hold of the run that ended with
            the last process of this session (a kernel that was started anew).
        fresh: start from new weights. A run goes on from what the last one trained, or is refused until a file has it: only
            fresh, resume and weights say that it may be thrown away.
        progress: show a bar while blocking.
    """

    num_epochs: int | None = option(None, "count", flag="epochs", setting="num_epochs")
    max_steps: int | None = option(None, "count", flag="max-steps")
    val_interval: int | None = option(None, "count", flag="val-interval", needs="val")
    detach: bool = option(False, "switch", flag="detach")
    criterion: Reference | None = option("CrossEntropyLoss", "name", flag="loss", known=LOSSES)
    criterion_args: Mapping[str, Any] | None = option(None, "arguments", flag="loss-args", needs="loss")
    step: Reference | None = option(None, "name", flag="step")
    optimizer: Reference = option("AdamW", "name", flag="optimizer", known=_OPTIMIZERS)
    optimizer_args: Mapping[str, Any] | None = option(None, "arguments", flag="optimizer-args")
    scheduler: Reference | None = option(None, "name", flag="scheduler", known=_SCHEDULERS)
    scheduler_args: Mapping[str, Any] | None = option(None, "arguments", flag="scheduler-args", needs="scheduler")
    scheduler_interval: str | None = option(
        None, "choice", flag="scheduler-interval", choices=("step", "epoch", "validation"), setting="scheduler_interval",
        needs="scheduler",
    )  # fmt: skip
    scheduler_metric: str | None = option(None, "text", flag="scheduler-metric", needs="scheduler")
    max_grad_norm: float | None = option(None, "norm", flag="clip", setting="max_grad_norm")
    accumulation_steps: int | None = option(None, "count", flag="accumulate", setting="accumulation_steps")
    sync: str = option("step", "choice", flag="sync", choices=("step", "local", "auto"))
    sync_every: int | None = option(None, "count", flag="sync-every", needs="sync")
    outer: str | None = option(
        None, "choice", flag="outer", choices=("nesterov", "average", *SPARSE_METHODS), needs="sync"
    )
    outer_lr: float | None = option(None, "norm", flag="outer-lr", needs="sync")
    outer_momentum: float | None = option(None, "norm", flag="outer-momentum", needs="sync")
    outer_args: Mapping[str, Any] | None = option(None, "arguments", flag="outer-args", needs="sync")
    sync_delay: int | None = option(None, "whole", flag="sync-delay", needs="sync")
    mixing: float | None = option(None, "norm", flag="mixing", needs="sync_delay")
    precision: str | None = option(None, "choice", flag="precision", choices=_PRECISIONS, setting="effective_precision")
    compile: bool = option(False, "switch", flag="compile")
    channels_last: bool = option(False, "switch", flag="channels-last")
    seed: int | None = option(None, "seed", flag="seed", setting="seed")
    shares: Sequence[float] | str | None = option(None, "weights", flag="shares")
    optimizer_site: str | None = option(
        None, "choice", flag="optimizer-site", choices=("workers", "orchestrator"), setting="optimizer_site"
    )
    wire: str = option("fp32", "choice", flag="wire", choices=("fp32", "bf16", "fp16", "int8", "int4"))
    buffers: str = option("auto", "policies", flag="buffers")
    batch: str | None = option(None, "words", flag="batch")
    callbacks: Sequence[Any] = option((), "objects", flag="callbacks")
    split_fn: Callable[[Any, Sequence[tuple[int, int]]], list[Any]] | None = option(
        None, "function", unsayable="a function of this process"
    )
    preprocess: Reference | None = option(None, "name", flag="preprocess")
    augment: Reference | None = option(None, "name", flag="augment")
    metrics: Any = option(None, "metrics", flag="metrics", needs="val")
    cache: str | None = option(None, "choice", flag="cache", choices=("off", "memory", "disk"), setting="worker_cache")
    cache_static: bool = option(False, "switch", flag="cache-static")
    data: str = option(
        "orchestrator", "choice", choices=("orchestrator", "worker"), unsayable="--data names the loader, which says it"
    )
    tokens: Reference | None = option(None, "name", flag="tokens")
    count_flops: bool | None = option(None, "switch", flag="flops", setting="count_flops")
    threads: int | None = option(None, "whole", unsayable="set for all runs by GUAVA_THREADS_PER_WORKER")
    budget_bytes: int | str | None = option(None, "size", flag="budget", setting="budget_bytes")
    save_path: str | Path | None = option(None, "file", flag="save", needs="budget")
    save_every: int | str | None = option(None, "period", flag="save-every", setting="save_interval")
    checkpoint_dir: str | Path | None = option(None, "file", flag="checkpoint-dir", setting="checkpoint_dir")
    save_best: str | None = option(None, "text", flag="save-best", needs="val")
    patience: int | None = option(None, "count", flag="patience", needs="val")
    keep: int | None = option(None, "count", flag="keep")
    log: str | Sequence[str] | None = option(
        None, "several", flag="log", choices=("csv", "tensorboard", "wandb", "mlflow")
    )
    check: str = option("warn", "choice", flag="check", choices=("warn", "strict", "off"))
    weights: str | Path | None = option(None, "file", flag="weights")
    save_only: str = option("all", "choice", flag="save-only", choices=("all", "trainable"))
    resume: str | Path | None = option(None, "file", flag="resume")
    fresh: bool = option(False, "switch", flag="fresh")
    progress: bool = option(True, "switch", unsayable="the magic draws a panel of its own")

    def __post_init__(self) -> None:
        """Refuse what would fail, or be ignored, in the middle of the run.

        Raises:
            ConfigError: a value is out of its range, or contradicts another one.
        """
        for one in option_infos(type(self)):
            value = getattr(self, one.name)
            if (value is not None or one.default is not None) and (rule := _broken_rule(one, value)):
                shown = f"a {type(value).__name__}" if one.kind in ("function", "objects") else repr(value)
                raise ConfigError(f"{one.name} is {shown}; {rule}")
        if self.batch and self.split_fn is not None:
            raise ConfigError("batch= says how batches are cut, and so does split_fn=: give one of them")
        if self.sync == "local":
            check_rounds(self)
        if self.sync == "step" and self.shares == MEASURED:
            raise ConfigError(
                "shares='measured' deals the local batches of a round, and with sync='step' there are none: give numbers, or "
                "sync='local' or 'auto' (--sync)"
            )
        if (self.criterion is None) == (self.step is None):
            raise ConfigError(
                "give either a criterion (loss of outputs and targets) or a step (of model and batch), exactly one"
            )

    @classmethod
    def of(cls, call: str, has_val: bool = True, **given: Any) -> Self:
        """Return the options that a user's call gives; a step takes the place of the criterion.

        Args:
            call: its name, for the error.
            has_val: there is a loader to validate with.
            given: options by name.

        Raises:
            TypeError: an unknown name; the near one is named.
            ConfigError: a wrong value, or one that another option leaves without effect.
        """
        known = [one.name for one in option_infos(cls)]
        for name in given:
            if name not in known:
                raise TypeError(f"{call}() got an unexpected keyword argument {name!r}{near(name, known)}")
        set_here = {name: value for name, value in given.items() if value is not None}
        for pair in (("step", "criterion"), ("step", "criterion_args"), ("resume", "fresh")):
            if all(set_here.get(name) for name in pair):
                raise ConfigError(
                    f"{pair[0]} and {pair[1]} contradict each other: one would have no effect; leave one out"
                )
        for one in option_infos(cls):
            needed = {
                "val": not has_val, "scheduler": "scheduler" not in set_here, "sync": set_here.get("sync") != "local",
                "sync_delay": not set_here.get("sync_delay"),
            }  # fmt: skip
            if needed.get(one.needs, False) and one.name in set_here:
                other = {"val": "val_loader", "sync": "sync='local'"}.get(one.needs, one.needs)
                raise ConfigError(
                    f"{one.name} has no effect without {other}: give {other} too, or leave {one.name} out"
                )
        return cls(**{**given, "criterion": None} if "step" in set_here else given)

    def settled(self, config: DistributedConfig) -> Self:
        """Return the options with the values of the configuration where none was given; the one place that joins them.

        Raises:
            ConfigError: a value of the configuration is none for a run.
        """
        settled = replace(self, num_epochs=self.num_epochs or self.max_steps)  # an epoch has one step at least
        missing = [one for one in option_infos(type(self)) if one.setting and getattr(settled, one.name) is None]
        settled = replace(settled, **{one.name: getattr(config, one.setting) for one in missing})
        settled = settled._with_rounds()
        if settled.keep and not settled.save_every:
            raise ConfigError(
                "keep has no effect without save_every: give save_every (--save-every) too, or leave keep out"
            )
        return replace(settled, max_grad_norm=settled.max_grad_norm or None)

    def synced(self, sync: str, sync_every: int, unlike: bool = False, **rounds: Any) -> Self:
        """Return settled options with what sync="auto" has chosen; rounds of `unlike` workers have measured shares.

        `rounds` are options that only rounds of local steps take: outer, wire, sync_delay.
        """
        shares = MEASURED if unlike and self.shares is None else self.shares
        shares = None if sync == "step" and shares == MEASURED else shares
        chosen = rounds if sync == "local" else {"outer": None}
        return replace(self, sync=sync, sync_every=sync_every, shares=shares, **chosen)._with_rounds()

    def _with_rounds(self) -> Self:
        """Fill in what a round of local sync is like; of a run that exchanges every step a round is one step."""
        if self.sync != "local":
            return replace(self, sync_every=1)
        return replace(self, **filled(self))


def option_infos(options: type[TrainingOptions] = TrainingOptions) -> tuple[OptionInfo, ...]:
    """Return all options of a class, in the order of its fields."""
    section = inspect.cleandoc(options.__doc__ or "").partition("\nAttributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in entries}
    return tuple(
        replace(one.metadata["facts"], name=one.name, default=one.default, text=texts.get(one.name, ""))
        for one in fields(options)
    )


#: What a value of a kind must be, and how to say it.
_RULES: Mapping[Kind, tuple[Callable[[Any], bool], str]] = {
    "whole": (lambda value: type(value) is int and value >= 0, "give a whole number, at least 0"),
    "count": (lambda value: type(value) is int and value >= 1, "give a whole number, at least 1"),
    "seed": (lambda value: isinstance(value, int) and 0 <= value < 2**63, "give a whole number from 0 to 2**63 - 1"),
    "norm": (
        lambda value: isinstance(value, int | float) and value >= 0, "give a number above 0, or 0 for no clipping"
    ),
    "weights": (lambda value: _are_weights(value), "give one number per worker, at least 0, one above, or 'measured'"),
    "words": (lambda value: isinstance(value, str), "give it like 'cut: image, label; whole: anchors'"),
    "policies": (lambda value: _are_policies(value), "give auto, average, first or sum, or parts such as name=sum"),
    "function": (callable, "give a function of a batch and row ranges"),
    "objects": (
        lambda value: isinstance(value, Sequence) and not any(isinstance(one, type) for one in value),
        "give a list of objects, not of classes: [Stop()]",
    ),
    "text": (lambda value: isinstance(value, str), "give a name"),
    "period": (lambda value: _is_period(value), "give steps, such as 500, or a time, such as '10min'"),
}  # fmt: skip


def _broken_rule(one: OptionInfo, value: Any) -> str:
    if one.kind == "several":
        names = listed(value) if isinstance(value, str | Sequence) else ()
        is_fine = names and all(name in one.choices for name in names)
        return _lacking(names) if is_fine else f"give one or several of: {', '.join(one.choices)}"
    if one.choices:
        return "" if value in one.choices else f"it is one of: {', '.join(one.choices)}"
    holds, rule = _RULES.get(one.kind, (lambda value: True, ""))
    return "" if holds(value) else rule


def listed(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of an option that takes several: with commas between them, or a list of them; each once."""
    names = value.split(",") if isinstance(value, str) else (value or ())
    return tuple(dict.fromkeys(str(name).strip() for name in names if str(name).strip()))


def _lacking(packages: Sequence[str]) -> str:
    """Which of these packages cannot be imported here; a folder that one left behind (`wandb/`) is none."""
    specs = {name: importlib.util.find_spec(name) for name in packages if name != "csv"}
    lacking = [name for name, found in specs.items() if found is None or found.origin is None]
    return f"install what is not here: pip install {' '.join(lacking)}" if lacking else ""


def _are_policies(buffers: Any) -> bool:
    words = [part.rpartition("=")[2].strip() for part in str(buffers).split(",")]
    return all(word in ("auto", "average", "first", "sum") for word in words)


def _is_period(value: Any) -> bool:
    if isinstance(value, str):
        with contextlib.suppress(ConfigError):
            return bool(parse_seconds(value))
        return False
    return type(value) is int and value >= 0


def _are_weights(shares: Any) -> bool:
    if shares == MEASURED:
        return True
    if not isinstance(shares, Sequence) or isinstance(shares, str) or not shares:
        return False
    return all(isinstance(s, int | float) and math.isfinite(s) and s >= 0 for s in shares) and any(shares)


def same_named(names: Iterable[str], *sources: object) -> dict[str, Any]:
    """Return what the sources have under these names; where several have one, the last of them counts."""
    return {name: getattr(source, name) for name in names for source in sources if hasattr(source, name)}


Method = TypeVar("Method", bound=Callable[..., Any])


def takes_options(options: type[TrainingOptions] = TrainingOptions) -> Callable[[Method], Method]:
    """Show every option where a user looks for it: in `help`, at Shift-Tab in a notebook, in `inspect.signature`.

    The method takes `**options`; its `{options}` in the docstring becomes the list of them.
    """
    # Not `Unpack` of a TypedDict: a checker reads that only where each name is written out a second time. So a wrong name
    # in a user's call is found by `TrainingOptions.of`, and mypy checks every use of the record's typed fields instead.

    def show(method: Method) -> Method:
        own = [one for one in inspect.signature(method).parameters.values() if one.kind is not one.VAR_KEYWORD]
        named, types = {one.name for one in own}, {one.name: one.type for one in fields(options)}
        further = [one for one in option_infos(options) if one.name not in named]
        method.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*own, *(_parameter(one, types[one.name]) for one in further)],
            return_annotation=inspect.signature(method).return_annotation,
        )
        entries = "\n".join(map(_entry, option_infos(options))).strip()
        method.__doc__ = (method.__doc__ or "").replace("{options}", entries)
        return method

    return show


def _parameter(one: OptionInfo, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=kind)


def _entry(one: OptionInfo) -> str:
    indent = " " * 12
    choices = f" One of: {', '.join(map(repr, one.choices))}." if one.choices else ""
    told = f"{one.name} (default {one.default!r}): {one.text}{choices}"
    return textwrap.fill(told, 120, initial_indent=indent, subsequent_indent=indent + "    ")
