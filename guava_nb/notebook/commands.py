"""The table of all magics: their options, choices and help; those of a run are the fields of `TrainingOptions`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from guava_nb.config import MODES, SCHEDULES, DistributedConfig
from guava_nb.notebook.line_options import (
    Command,
    Option,
    byte_size,
    choice,
    duration,
    flag,
    integer,
    json_object,
    number,
    option,
    period,
    shares,
    word,
    zero_stage,
)
from guava_nb.spec.training_options import LOSSES, Kind, OptionInfo, TrainingOptions, option_infos

__all__ = ["COMMANDS", "run_options"]

#: What other programs call these modes.
_OTHER_MODE_NAMES = {
    **dict.fromkeys(("ddp", "dp", "dataparallel", "distributeddataparallel"), "data"),
    **dict.fromkeys(("fsdp", "fsdp2", "zero3", "zero-3"), "zero --zero 3"),
    "zero1": "zero --zero 1",
    "zero2": "zero --zero 2",
    "deepspeed": "zero",
    **dict.fromkeys(("pp", "stages", "gpipe"), "pipeline"),
    **dict.fromkeys(("tp", "megatron"), "tensor"),
    **dict.fromkeys(("3d", "2d"), "hybrid"),
}
_DEVICES = ("auto", "cpu", "cuda", "cuda:0", "mps")


def _one(flag_name: str, names: tuple[str, ...], text: str) -> Option:
    return option(flag_name, metavar="|".join(names), type=choice(*names), complete=names, help=text)


def _count(flag_name: str, text: str, low: int = 1, metavar: str = "N") -> Option:
    return option(flag_name, metavar=metavar, type=integer(low), help=text)


def _json(flag_name: str, text: str, example: str = '{"hidden": 64}') -> Option:
    return option(flag_name, metavar="JSON", type=json_object(example), help=text)


def _expression(flag_name: str, text: str, required: bool = False) -> Option:
    return option(flag_name, metavar="EXPR", required=required, complete=("<loaders>",), help=text)


def _shared(flag_name: str, text: str, *names: str, required: bool = False) -> Option:
    """What is found in shared cells, or is well known."""
    return option(flag_name, metavar="NAME", required=required, complete=("<shared>", *names), help=text)


def _metrics(text: str) -> Option:
    return option("--metrics", metavar="EXPR", complete=("<shared>",), help=text)


def _file(flag_name: str, text: str, metavar: str = "PATH") -> Option:
    return option(flag_name, metavar=metavar, complete=("<files>",), help=text)


def _words(flag_name: str, text: str) -> Option:
    return option(flag_name, metavar="WORDS", help=text)


def _launcher(text: str) -> Option:
    return option(
        "--on",
        metavar="NAME:WHAT",
        complete=("<launchers>",),
        help=f"{text}: ssh:HOST[,HOST...], slurm:N, k8s:N, ray:N, docker:N; KEY=VALUE may follow, with commas, as in "
        "slurm:8,gpus=1,time=4:00:00; a wrong KEY lists them (default: GUAVA_WORKERS_ON)",
    )


_BATCH = _words("--batch", "how batches are read where they are shared out, as for %%guava_train")
#: Of magics that ask a model which may not have been trained in this session.
_MODEL = (
    _shared(
        "--model", "class or function that makes the model, where none was trained here and the checkpoint names none"
    ),
    _json("--model-args", "keyword arguments of the model"),
)

UP = Command(
    "guava_up",
    "Open a session: listen for workers and show the cell to paste into their notebooks. Run again: shows the same session, and "
    "starts its tunnel anew if that is down; another --tunnel takes its place, and workers go on with the new code.",
    (
        option(
            "--tunnel",
            metavar="NAME[:WHAT]",
            complete=("<tunnels>",),
            help="how others reach this machine: cloudflared (if you do not know which), ngrok, ngrok-http, "
            "ssh:[USER@]HOST[:PORT], direct[:HOST[:PORT]] (PORT is the one that workers dial), local (default: GUAVA_TUNNEL; "
            "without one only this machine, or --host, is reached)",
        ),
        option("--port", metavar="P", type=integer(0, 65535), help="port to listen on (default: any free one)"),
        option("--host", metavar="H", help="address to listen on (default: 127.0.0.1, this machine only)"),
        _count("--workers", "how many workers training waits for, local ones too (default: the configuration's, 1)"),
        _count("--local", "also start N workers on this machine (default: 0)", 0),
        _launcher("have workers started elsewhere, and ended by %%guava_down"),
        option(
            "--connect",
            nargs="*",
            metavar="CODE",
            help="dial a worker that listens (guava worker --listen, GPUTrainer) instead of listening; again for a further one",
        ),
        _one(
            "--compression",
            ("auto", "on", "off"),
            "lossless, of batches, gradients and parameters (default: auto, where it pays)",
        ),
        _count("--prefetch-mb", "batches that a worker may hold ahead of need (default: 64)", 0, "MB"),
        flag("--no-tls", help="do not encrypt; only for a network that encrypts already"),
        flag("--show-code", help="show the join code even when all workers are local"),
        flag(
            "--background",
            help="run the session in a process beside this kernel, which outlives the kernel: it has the cells "
            "marked %%%%guava_share and nothing else of this notebook; %%guava_up in the next kernel finds it",
        ),
        option("--idle-limit", metavar="TIME", type=duration, help="--background: end unused after (default: 12h)"),
    ),
    "%guava_up --tunnel ngrok --workers 2",
    code_to="connect",
)
WORKER = Command(
    "guava_worker",
    "Work for a session until it closes. First interrupt: leave after the step; second: end the process. With a new code of the "
    "same session: go on there, with all state.",
    (
        word("code", nargs="*", metavar="CODE", help="join code from %%guava_up (default: GUAVA_JOIN_CODE)"),
        option("--device", metavar="D", complete=_DEVICES, help="cpu, cuda:0, ... (default: auto)"),
        option("--name", metavar="NAME", help="its name in tables and logs (default: host and device)"),
        flag("--detach", help="do not block the cell (a free Colab counts as idle then)"),
    ),
    "%guava_worker guava1:...",
    code_to="code",
)
SHARE = Command(
    "guava_share",
    "Run this cell here; if it succeeds, share its text with all workers.",
    (
        option(
            "--name", metavar="NAME", help="name of the cell; the newest text per name counts (default: the cell's id)"
        ),
        option(
            "--forget",
            metavar="NAME",
            complete=("<cells>",),
            help="share a cell no longer, on a line of its own: %%guava_share --forget NAME",
        ),
        flag(
            "--background",
            help="for a background session (%%guava_up --background) and no worker: a cell that makes loaders",
        ),
    ),
    "%%guava_share --name model",
    sign="%%",
)
_ON = option("--on", metavar="NAMES", complete=("<workers>",), help="only these workers, with commas (default: all)")
_RANK = option("--rank", metavar="N", type=integer(0), help="only the worker of this rank, from 0")
PX = Command(
    "guava_px",
    "Run this cell on the workers, while no run goes on. What it prints comes as it is printed; the value of its last expression "
    "comes back, by worker. Its names stay there for the next cell; device, worker and rank are defined. An interrupt stops it.",
    (
        _ON,
        _RANK,
        option("-o", "--out", metavar="NAME", help="store the values in this variable instead of showing them"),
    ),
    "%%guava_px --on local-1",
    sign="%%",
)
RUN = Command(
    "guava_run",
    "Run a torch.distributed program on the workers, one rank each, as torchrun would: this cell, or with %guava_run a file. "
    "It may be anything that begins with init_process_group, or a library that does. What %guava_push and %%guava_px left there "
    "is there, %guava_pull brings what it made. Where one rank fails, all end. An interrupt stops it.",
    (
        _ON,
        _one("--path", ("auto", "relay", "direct"), "as for %%guava_mode (default: auto)"),
        word(
            "arguments",
            nargs="*",
            metavar="...",
            complete=("<files>",),
            help="%%guava_run: a file, then its own arguments; %%%%guava_run: arguments of the program, in sys.argv",
        ),
    ),
    "%%guava_run --on local-1,local-2",
    sign="%%",
    rest_to="arguments",
)
PUSH = Command(
    "guava_push",
    "Set variables of this notebook on the workers that are here now: numbers, text, lists, dicts, tensors, arrays, tables.",
    (word("names", nargs="+", metavar="NAME", complete=("<names>",), help="variables of the notebook"), _ON, _RANK),
    "%guava_push images labels",
)
PULL = Command(
    "guava_pull",
    "Bring variables from the workers here: a dict by worker, or the value itself where the line chooses one worker.",
    (word("names", nargs="+", metavar="NAME", help="variables at the workers"), _ON, _RANK),
    "%guava_pull result --rank 0",
)
PIP = Command(
    "guava_pip",
    "Have pip install packages at the workers. Torch, numpy and all that is loaded there keep their versions; where that cannot "
    "be, nothing is installed, and pip's reason is shown.",
    (word("packages", nargs="+", metavar="PACKAGE", help="as for pip install: einops, 'einops>=0.8'"), _ON),
    "%guava_pip einops",
)
FILES = Command(
    "guava_files",
    "Send your own modules to the workers: text files, and folders of them as packages. Code there imports them by name; run "
    "again after a change, and they are loaded anew.",
    (word("paths", nargs="+", metavar="PATH", complete=("<files>",), help="files and folders"), _ON),
    "%guava_files helpers.py mypackage",
)
MODE = Command(
    "guava_mode",
    "Choose how work is spread; without an argument, show it.",
    (
        word(
            "mode",
            nargs="?",
            metavar="MODE",
            type=choice(*MODES, also=_OTHER_MODE_NAMES),
            complete=MODES,
            help="data: whole model on each worker, a part of each batch; pipeline: some layers on each worker; tensor: a part "
            "of each layer on each worker; zero: data, but optimizer state (and more) is shared out; hybrid: several axes",
        ),
        _count("--dp", "zero, hybrid: replicas that share the batch (default: what the other axes leave)"),
        _count("--pp", "pipeline, hybrid: stages (default in pipeline mode: all workers)"),
        _count("--tp", "tensor, hybrid: workers that share each layer (default in tensor mode: all)"),
        option(
            "--zero",
            metavar="1|2|3",
            type=zero_stage,
            help="zero, hybrid: 1: optimizer state is shared out, 2: gradients too, 3: parameters too; with stages "
            "at most 1 (default in zero mode: 2, in hybrid mode: 0, nothing)",
        ),
        _count("--micro-batches", "pipeline: parts a batch is cut into (default: 4)", 1, "M"),
        _one("--schedule", SCHEDULES, "pipeline: order of forwards and backwards; auto measures (default: 1f1b)"),
        _count("--stages-per-worker", "pipeline: more than 1 with --schedule interleaved (default: 1)"),
        option(
            "--split",
            metavar="NAMES",
            help="pipeline: modules that begin a stage, with commas (default: balances by itself)",
        ),
        _one("--balance", ("parameters", "time"), "pipeline: what stages have equally much of (default: parameters)"),
        _json(
            "--plan",
            'tensor, hybrid: {"pattern of modules": "colwise|rowwise|vocab|replicate|partial"}; partial: a whole module between '
            "split layers, whose gradients are added up (default: found by itself)",
            '{"*.up": "colwise", "*.down": "rowwise"}',
        ),
        option(
            "--checkpoint-activations",
            metavar="NAMES",
            help='modules whose activations are computed again in backward, with commas; "*": every block that repeats',
        ),
        _one("--sync-batchnorm", ("on", "off"), "batch norms see all workers' rows; no pipeline (default: off)"),
        _one(
            "--path",
            ("auto", "relay", "direct"),
            "relay: through the orchestrator; direct: between the workers (default: auto, direct where all reach each other)",
        ),
    ),
    "%guava_mode pipeline --micro-batches 8",
)
#: How a line says a value of each kind.
_LINE_OF: Mapping[Kind, Callable[[str, str, OptionInfo], Option]] = {
    "name": lambda flag_name, text, info: _shared(flag_name, text, *info.known),
    "arguments": lambda flag_name, text, info: _json(flag_name, text),
    "metrics": lambda flag_name, text, info: _metrics(text),
    "choice": lambda flag_name, text, info: _one(flag_name, info.choices, text),
    "count": lambda flag_name, text, info: _count(flag_name, text),
    "whole": lambda flag_name, text, info: _count(flag_name, text, 0),
    "seed": lambda flag_name, text, info: _count(flag_name, text, 0),
    "norm": lambda flag_name, text, info: option(flag_name, metavar="X", type=number, help=text),
    "size": lambda flag_name, text, info: option(flag_name, metavar="SIZE", type=byte_size, help=text),
    "policies": lambda flag_name, text, info: option(flag_name, metavar="POLICY", help=text),
    "weights": lambda flag_name, text, info: option(flag_name, metavar="A,B,...", type=shares, help=text),
    "period": lambda flag_name, text, info: option(flag_name, metavar="N|TIME", type=period, help=text),
    "text": lambda flag_name, text, info: option(flag_name, metavar="NAME", help=text),
    "objects": lambda flag_name, text, info: option(flag_name, metavar="NAMES", help=text),
    "several": lambda flag_name, text, info: option(
        flag_name, metavar="|".join(info.choices), complete=info.choices, help=text
    ),
    "switch": lambda flag_name, text, info: flag(flag_name, help=text),
    "file": lambda flag_name, text, info: _file(flag_name, text),
    "words": lambda flag_name, text, info: _words(flag_name, text),
}


def _with_default(info: OptionInfo) -> str:
    """What an option says of itself, with what counts where it is left out."""
    text, default = info.text.rstrip("."), info.default
    if info.setting:
        default = getattr(DistributedConfig(), info.setting)
        shown = rf"\1, {'off' if default is False else default}"
        return re.sub(r"(?<=y default the configuration's)( `\w+`)?(?=$|[;.])", shown, text)
    is_needed = info.flag in ("loss", "step")  # one of them is to be given
    return text if default in (None, (), False) or is_needed else f"{text} (default: {default})"


def run_options(options: type[TrainingOptions] = TrainingOptions) -> tuple[Option, ...]:
    """The options of a run that a line can say, as the fields of a class tell them."""
    return tuple(
        _LINE_OF[info.kind](f"--{info.flag}", _with_default(info).replace("%", "%%"), info)
        for info in option_infos(options)
        if info.flag
    )


TRAIN = Command(
    "guava_train",
    "Train over all workers. Blocks and returns the run; the first interrupt stops after the step, the second at once.",
    (
        _shared("--model", "class or function of a shared cell, or package.module:name", required=True),
        _json("--model-args", "keyword arguments of the model"),
        _expression("--data", "DataLoader of the notebook, or WorkerData for what the workers have", required=True),
        _expression("--val", "DataLoader to validate on"),
        *run_options(),
        option("--lr", metavar="X", type=number, help="learning rate, short for --optimizer-args (default: see there)"),
        option(
            "--weight-decay",
            metavar="X",
            type=number,
            help="weight decay, short for --optimizer-args (default: see there)",
        ),
        flag("--dry-run", help="only show what the run would send and receive, and what would make it less"),
        option("-o", "--out", metavar="NAME", help="also store the run in this variable; with --dry-run the forecast"),
    ),
    "%guava_train --model Net --loss CrossEntropyLoss --data train --val test --epochs 3 --optimizer AdamW --lr 1e-3",
    one_of=("loss", "step"),
)
VALIDATE = Command(
    "guava_validate",
    "Loss, accuracy and metrics of the trained model on a DataLoader. Each sample counts once, even if a worker is lost.",
    (
        _expression("--data", "DataLoader of the notebook", required=True),
        _metrics("shared functions(outputs, targets) or torchmetrics metrics: names with commas, or an expression"),
        _shared("--loss", "criterion, where nothing was trained yet (default: CrossEntropyLoss)", *LOSSES),
        *_MODEL,
        _BATCH,
    ),
    "%guava_validate --data test",
)
PREDICT = Command(
    "guava_predict",
    "Predict every sample with the trained model, in the order of the data set; returns the results. With --generate a language "
    "model continues prompts, shared out over the workers; each is shown as it is done.",
    (
        _expression(
            "--data",
            "DataLoader of the notebook; of (inputs, targets) the targets stay here; or prompts",
            required=True,
        ),
        _count("--top-k", "the best K classes of each sample (default: 1)", 1, "K"),
        option("--threshold", metavar="P", type=number, help="samples whose best class is less probable get class -1"),
        flag("--full", help="the probabilities of all classes too"),
        flag("--raw", help="the outputs as they are, for models that give no [rows, classes]"),
        _shared("--step", "a shared function(model, batch) that returns the outputs"),
        _file("--path", "write memory maps into this folder, for results larger than memory", "DIR"),
        flag("--resume", help="go on with what --path holds"),
        flag(
            "--show", help="compare with the classes of the data set: which is taken for which, and samples as images"
        ),
        option("--into", metavar="NAME", help="also store the results in this variable"),
        flag("--generate", help="continue the prompts of --data: texts, or lists of tokens"),
        _count("--max-new-tokens", "--generate: for each prompt (default: 50)"),
        option(
            "--temperature",
            metavar="X",
            type=number,
            help="--generate: sample, among --top-k if given (default: 0, the likeliest)",
        ),
        _count("--seed", "--generate: prompt I is sampled by the seed N + I (default: 0)", 0),
        _expression("--tokenizer", "--generate: tokenizer of the notebook, for prompts of text"),
        _count("--context", "--generate: the model sees so many of the last tokens (default: all)"),
        _json("--generate-args", "--generate: further arguments of transformers' generate", '{"num_beams": 4}'),
        *_MODEL,
        _BATCH,
    ),
    "%guava_predict --data test --top-k 3 --into results",
)
STATUS = Command(
    "guava_status",
    "Show which workers are here, what runs and how far it is. Works in a page that was loaded anew, too. In a terminal: guava "
    "status --follow.",
    (
        flag(
            "-f",
            "--follow",
            help="show the newest run until it has ended, or until the cell is interrupted, which leaves the run alone",
        ),
    ),
    "%guava_status --follow",
)
RUNS = Command(
    "guava_runs",
    "The runs of this notebook beside each other, the newest first, those of kernels before and of killed ones too: how they "
    "ended and in which settings they differ; of runs that are named, the losses in one picture as well.",
    (
        word("runs", nargs="*", metavar="RUN", complete=("<runs>",), help="only these, with the picture"),
        _count("-n", "how many of the newest (default: 10)"),
        flag("--all", help="all that are kept, at most 50"),
        _file(
            "--csv", "write every point of the curves of those that are shown into this file: run, figure, step, value"
        ),
        _file("--png", "write the picture of their losses into this file"),
    ),
    "%guava_runs run-3 run-5 --png losses.png",
)
ENERGY = Command(
    "guava_energy",
    "Show the joules of the newest run per worker, sample, step, epoch and phase, and by the names given with energy_task. "
    'Returns the record: pandas.DataFrame(record["workers"]), or ["tasks"].',
    (
        option("--grams-per-kwh", metavar="G", type=number, help="CO2 equivalent of a kWh where the machines stand"),
        option("--price-per-kwh", metavar="P", type=number, help="price of a kWh, in any currency"),
    ),
    "%guava_energy --grams-per-kwh 380 --price-per-kwh 0.30",
)
LOG = Command(
    "guava_log",
    "Last lines that workers printed.",
    (
        word("worker", nargs="?", metavar="WORKER", complete=("<workers>",), help="only this worker"),
        _count("-n", "how many lines (default: %%config Guava.log_lines, 50)"),
        flag(
            "-f", "--follow", help="go on with new lines until the run or the worker ends, or the cell is interrupted"
        ),
    ),
    "%guava_log local-1 -n 20",
)
SAVE = Command(
    "guava_save",
    "Write a checkpoint of the last committed step.",
    (word("path", metavar="PATH", complete=("<files>",), help="file to write"),),
    "%guava_save digits.pt",
)
RESUME = Command(
    "guava_resume",
    "Load a checkpoint; the next %guava_train goes on from it, its --epochs counts from the very beginning. %guava_validate and "
    "%guava_predict use it at once.",
    (word("path", metavar="PATH", complete=("<files>",), help="file that %%guava_save wrote"), *_MODEL),
    "%guava_resume digits.pt",
)
EXPORT = Command(
    "guava_export",
    "Write a plain program of the last run, which torchrun, Ray Train or Lightning Fabric runs without guava_nb: same losses.",
    (
        word("path", metavar="PATH", complete=("<files>",), help="file to write, such as train.py"),
        option(
            "--form",
            metavar="torch|ray|fabric",
            type=choice("torch", "ray", "fabric"),
            complete=("torch", "ray", "fabric"),
            default="torch",
            help="torch: for torchrun, every mode; ray (TorchTrainer) and fabric: data mode. By default torch",
        ),
        flag("--save-data", help="write tensors that lie in memory beside it (.pt); else fill in build_data()"),
        flag("--overwrite", help="replace a file that is there"),
    ),
    "%guava_export train.py",
)
STOP = Command(
    "guava_stop",
    "Stop the detached run after its step (again: at once), or let this notebook's worker leave.",
    example="%guava_stop",
)
DOWN = Command(
    "guava_down", "Close the session: end the run, send the workers home, free the port.", example="%guava_down"
)
DOCTOR = Command(
    "guava_doctor",
    "Check this machine; with a join code also the way to its session, step by step, and how fast the line is (this sends up to "
    "11 MB).",
    (
        word("code", nargs="*", metavar="CODE", help="join code from %%guava_up (default: GUAVA_JOIN_CODE, if set)"),
        flag("--join", help="ask for the join code, which is then in no cell and no output"),
        _launcher("also check what starting workers there needs"),
    ),
    "%guava_doctor guava1:...",
    code_to="code",
)

COMMANDS = (
    *(UP, WORKER, SHARE, PX, RUN, PUSH, PULL, PIP, FILES, MODE, TRAIN, VALIDATE, PREDICT),
    *(STATUS, RUNS, ENERGY, LOG, SAVE, RESUME, EXPORT, STOP, DOWN, DOCTOR),
)
