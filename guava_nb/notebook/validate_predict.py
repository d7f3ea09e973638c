"""%guava_validate and %guava_predict: options as arguments, progress while they run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

from IPython.core.error import UsageError

from guava_nb.notebook.display import say
from guava_nb.notebook.line_words import in_a_folder
from guava_nb.notebook.lines import Notices
from guava_nb.notebook.panel.panel import Panel
from guava_nb.notebook.results.shown_classes import check_can_show, show_classes
from guava_nb.notebook.results.streamed_text import StreamedText
from guava_nb.notebook.train import check_variable, metrics_argument, resolve
from guava_nb.render import Progress, View
from guava_nb.render.values import show_float

__all__ = ["predict", "validate"]

#: Options of %guava_predict that only --generate has, and those that it has not.
_OF_GENERATE = ("max_new_tokens", "temperature", "seed", "tokenizer", "context", "generate_args")
_NOT_OF_GENERATE = ("threshold", "full", "raw", "step", "path", "resume", "batch")


def _validate_arguments(args: argparse.Namespace, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `Orchestrator.validate`.

    Raises:
        UsageError: an expression fails.
    """
    given = {"loader": resolve(args.data, namespace, "--data")}
    if args.metrics is not None:
        given["metrics"] = metrics_argument(args.metrics, namespace)
    if args.batch is not None:
        given["batch"] = args.batch
    return given if args.loss is None else {**given, "criterion": args.loss}


def _predict_arguments(args: argparse.Namespace, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `Orchestrator.predict`.

    Raises:
        UsageError: an option contradicts another one, or the expression of the data fails.
    """
    if args.resume and args.path is None:
        raise UsageError("%guava_predict: --resume goes on with what a folder holds, so it needs --path")
    if args.show and (args.raw or args.step is not None):
        raise UsageError("%guava_predict: --show compares classes, and --raw and --step give other outputs; keep one")
    check_variable(args.into, "--into")
    if args.path is not None:
        in_a_folder(args.path, "--path")
    given = {
        "top_k": args.top_k,
        "confidence_threshold": args.threshold,
        "path": args.path,
        "predict_step": args.step,
        "batch": args.batch,
    }
    flags = {"return_full_probabilities": args.full, "raw": args.raw, "resume": args.resume}
    chosen = {name: value for name, value in {**given, **flags}.items() if value is not None and value is not False}
    return {"loader": resolve(args.data, namespace, "--data"), **chosen}


def validate(
    orchestrator: Any, args: argparse.Namespace, names: Mapping[str, Any], panel: Panel, look: Callable[[], None]
) -> Any:
    """Do what a line of %guava_validate asks; returns the figures.

    Args:
        look: called a few times a second meanwhile, in the cell's own thread.
    """
    arguments = _validate_arguments(args, names)
    figures: list[str] = []
    with _progress_on(panel, "validating", "validated", look, figures) as progress:
        found = orchestrator.validate(**arguments, progress=progress)
        names_shown = ("loss", "accuracy", "perplexity")
        figures += [f"{name} {show_float(found[name])}" for name in names_shown if found.get(name) is not None]
    return found


def predict(
    orchestrator: Any,
    args: argparse.Namespace,
    names: MutableMapping[str, Any],
    panel: Panel,
    look: Callable[[], None],
    ui: str,
) -> Any:
    """Do what a line of %guava_predict asks; returns the results, and stores them where the line says.

    Args:
        look: as for `validate`.
        ui: one of `display.UI_NAMES`, for what --show shows.
    """
    if args.generate:
        return _generate(orchestrator, args, names, panel, look, ui)
    if given := [one for one in _OF_GENERATE if getattr(args, one) is not None]:
        raise UsageError(f"%guava_predict: --{given[0].replace('_', '-')} needs --generate")
    arguments = _predict_arguments(args, names)
    if args.show:
        check_can_show(arguments["loader"])
    with _progress_on(panel, "predicting", "predicted", look) as progress:
        found = orchestrator.predict(**arguments, progress=progress)
    if args.into is not None:
        names[args.into] = found
    if args.show:
        show_classes(arguments["loader"], found, ui)
    return found


def _generate(
    orchestrator: Any,
    args: argparse.Namespace,
    names: MutableMapping[str, Any],
    panel: Panel,
    look: Callable[[], None],
    ui: str,
) -> Any:
    """Continue prompts, and show what follows each as it is made."""
    if other := [one for one in _NOT_OF_GENERATE if getattr(args, one) not in (None, False)]:
        raise UsageError(f"%guava_predict: --{other[0]} has no meaning with --generate")
    check_variable(args.into, "--into")
    prompts = resolve(args.data, names, "--data")
    given = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_k", "seed", "context")}
    chosen = {name: value for name, value in given.items() if value is not None} | (args.generate_args or {})
    if args.tokenizer is not None:
        chosen["tokenizer"] = resolve(args.tokenizer, names, "--tokenizer")
    shown = [prompts] if isinstance(prompts, str) else prompts

    stream = StreamedText(shown)
    look_at_both = _telling(orchestrator, stream, look)
    if ui == "text":
        panel.close()  # its lines would stand in the middle of those of the prompts, which tell as much
    try:
        with _progress_on(panel, "generating", "generated", look_at_both, unit="prompt") as progress:
            found = orchestrator.generate(
                prompts,
                on_done=stream.end,
                on_tokens=stream.add,
                progress=lambda count, _: progress(count, len(shown) if isinstance(shown, Sized) else None),
                **chosen,
            )
    finally:
        stream.break_line()
    if args.into is not None:
        names[args.into] = found
    return found


def _telling(orchestrator: Any, stream: StreamedText, look: Callable[[], None]) -> Callable[[], None]:
    """Return what also tells what happened to workers meanwhile, in lines of their own."""
    notices, told = Notices(orchestrator), list[str]()

    def look_at_both() -> None:
        look()
        for notice in notices.latest():
            if notice not in told:
                told.append(notice)
                stream.break_line()
                say(notice)

    return look_at_both


@contextmanager
def _progress_on(
    panel: Panel, doing: str, done: str, look: Callable[[], None], figures: Sequence[str] = (), unit: str = "sample"
) -> Iterator[Callable[[int, int | None], None]]:
    """Give a function that draws the progress of a pass; at the end the panel says how much was done.

    Args:
        panel: is closed at the end, also when something raises.
        doing: title while it goes on.
        done: title at the end.
        look: called with each of them.
        figures: said at the end, beside how much was done.
        unit: what is counted.
    """
    last: list[tuple[int, int | None]] = []
    title, told = f"not {done}", tuple[str, ...]()

    def draw(count: int, total: int | None) -> None:
        look()
        last[:] = [(count, total)]
        panel.update(lambda: (View(doing, _headline(count, total, unit), Progress(count, total, unit)), ()))

    try:
        yield draw
        title, told = done, tuple(figures)
    except KeyboardInterrupt:
        title = "interrupted"
        raise
    finally:
        if last:  # what it drew must not stay as it was, in a stored notebook either
            count, total = last[0]
            panel.finish(lambda: (View(title, ", ".join((_headline(count, total, unit), *told))), ()))
        panel.close()


def _headline(count: int, total: int | None, unit: str) -> str:
    return f"{count} {unit}s" if total is None or count >= total else f"{count} of {total} {unit}s"
