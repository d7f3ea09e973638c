"""The magics: each parses its line, calls the session once and shows what came back."""

from __future__ import annotations

import argparse
import atexit
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class, no_var_expand

from guava_nb.errors import of_the_user
from guava_nb.export.blanks import to_be_filled_in
from guava_nb.launchers import launcher_names
from guava_nb.notebook import commands
from guava_nb.notebook.background.background import Background
from guava_nb.notebook.completion import files, install_completion, loaders, names, remove_completion
from guava_nb.notebook.display import choose_ui, say, show, show_help, show_png
from guava_nb.notebook.doctor import doctor_report
from guava_nb.notebook.formatters import ObjectViews
from guava_nb.notebook.host import detect_host
from guava_nb.notebook.join_code import hand_over, say_grant
from guava_nb.notebook.line_options import Command
from guava_nb.notebook.line_words import in_a_folder
from guava_nb.notebook.notebook_session import NotebookSession
from guava_nb.notebook.panel.blocking import Interrupted, follow_lines
from guava_nb.notebook.panel.following import Followed
from guava_nb.notebook.panel.panel import Panel, make_panel
from guava_nb.notebook.settings import add_settings, remove_settings, settings_of
from guava_nb.render import View, energy_view, forecast_view, runs_view
from guava_nb.spec.loading import half_loaded_text
from guava_nb.tunnels import tunnel_names

__all__ = ["GuavaMagics", "load", "unload"]


#: What to do where the time of a panel stands still: the page was closed, or loaded anew. The cell that trains blocks others.
_OTHER_WAY = "if this time stands still: guava status --follow (or --web) in a terminal shows the run live"
_UNBROKEN = 1000  # characters of a line of help that a page breaks itself
_AGAIN = "if this time stands still: run %guava_status --follow"


def _command(command: Command) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a magic its parser, its help and its manners: the method gets parsed arguments only."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: GuavaMagics, line: str, cell: str | None = None) -> Any:
            __tracebackhide__ = True  # IPython leaves this frame out
            try:
                args = command.parse(line, self.shell.user_ns)
                if args is None:
                    return show_help(command.help(), command.help(_UNBROKEN), choose_ui(self.shell))
                if self.background.takes(command.name, args):
                    value = self.background.magic(self, command.name, args, cell)
                else:
                    value = method(self, args) if cell is None else method(self, args, cell)
                return self.objects.cut_short(value)
            except Interrupted:
                raise  # it has its sentence
            except KeyboardInterrupt:
                raise Interrupted(f"%{command.name} was cut short; %guava_status shows where things stand") from None
            except Exception as error:
                raise error.with_traceback(of_the_user(error.__traceback__))  # noqa: B904  it is the same error

        call.__doc__ = f"{command.help()}\n"
        return no_var_expand(call)

    return decorate


@magics_class
class GuavaMagics(Magics):
    """All magics of guava_nb over one `NotebookSession`."""

    def __init__(self, shell: Any, session: NotebookSession | None = None) -> None:
        super().__init__(shell)
        self.session = session or NotebookSession(shell)
        self.background = Background(shell, lambda: self.session)
        self.answers: Any = None  # in the process of a background session: what is done for its notebooks
        self.objects = ObjectViews(shell)

    @line_magic
    @_command(commands.UP)
    def guava_up(self, args: argparse.Namespace) -> None:
        """Open the session or show the open one, and hand out the join code."""
        notes = self.session.open(args)
        (view,) = self.session.views(with_tunnel=False)[:1]
        if (self.session.is_local_only or args.on) and not args.show_code:
            whose = "started by --on" if args.on else "local"
            notes.append(f"All workers are {whose}, so no join code is shown; %guava_up --show-code shows it.")
        elif self.session.has_code:
            if note := self.session.tunnel_note:  # above the cell to paste, which fails without it
                say(note)
            self._show_code()
            notes += filter(None, [self.session.reach_note])
        closing = "%guava_down closes the session."
        self._show(View(view.title, view.headline, None, view.tables, (*view.notes, *notes, closing)))

    @line_magic
    @_command(commands.WORKER)
    def guava_worker(self, args: argparse.Namespace) -> None:
        """Say what joining grants, join, and show the worker; lead one that is here by its session's new code."""
        panel, worker = self.panel(), self.session.worker
        code = self.session.worker_code(args.code)
        if worker.lives:
            say(worker.follow(code))
        else:
            say_grant(detect_host(self.shell), code.host, choose_ui(self.shell))
            worker.join(code, args.device, args.name)
        if args.detach:
            return self._show(*self.session.views())
        return worker.work(panel)

    @line_cell_magic
    @_command(commands.SHARE)
    def guava_share(self, args: argparse.Namespace, cell: str | None = None) -> None:
        """Run a cell and share it, or share one no longer."""
        if args.forget is not None:
            say(self.session.forget(args.forget, alone=cell is None and args.name is None))
            return
        name = self.session.share(args.name, cell, not args.background)
        if args.background:
            say(
                f"Cell {name} ran here; no worker gets it. %guava_up --background has it run in the background session, too."
            )
            return
        say(f"Cell {name} is shared{'' if self.session.is_open else ' as soon as %guava_up opens a session'}.")
        for sentence in self.session.cells.undefined(name):
            say(f"Not all that is shared can be trained yet: {sentence}.")

    @line_cell_magic
    @_command(commands.PX)
    def guava_px(self, args: argparse.Namespace, cell: str | None = None) -> Any:
        """Run a cell on the workers."""
        if cell is None:
            raise UsageError(
                "%guava_px has no cell to run: write %%guava_px, with two percent signs, as the first line of a cell, and below "
                "it what the workers shall run"
            )
        return self.session.code.run(args, cell)

    @line_cell_magic
    @_command(commands.RUN)
    def guava_run(self, args: argparse.Namespace, cell: str | None = None) -> None:
        """Run a program over the workers."""
        self.session.code.run_program(args, cell, self.panel())

    @line_magic
    @_command(commands.PUSH)
    def guava_push(self, args: argparse.Namespace) -> None:
        """Set variables on the workers."""
        say(self.session.code.push(args))

    @line_magic
    @_command(commands.PULL)
    def guava_pull(self, args: argparse.Namespace) -> Any:
        """Bring variables from the workers; returns the value."""
        told, value = self.session.code.pull(args)
        say(told)
        return value

    @line_magic
    @_command(commands.PIP)
    def guava_pip(self, args: argparse.Namespace) -> None:
        """Install packages at the workers."""
        say(self.session.code.install(args))

    @line_magic
    @_command(commands.FILES)
    def guava_files(self, args: argparse.Namespace) -> None:
        """Send modules to the workers."""
        say(self.session.code.send_files(args))

    @line_magic
    @_command(commands.MODE)
    def guava_mode(self, args: argparse.Namespace) -> None:
        """Choose or name the mode."""
        say(self.session.choose_mode(args))

    @line_magic
    @_command(commands.TRAIN)
    def guava_train(self, args: argparse.Namespace) -> Any:
        """Train and return the run, or only show what it would send and receive, and return that."""
        if args.dry_run:
            return self._show_and_return(forecast_view, self.session.forecast(args))
        run = self.session.train(args, self.panel(_OTHER_WAY))
        if not args.detach:
            self.objects.shown(run)
        return run

    @line_magic
    @_command(commands.VALIDATE)
    def guava_validate(self, args: argparse.Namespace) -> Any:
        """Return loss, accuracy, samples and metrics."""
        return self.session.validate(args, self.panel())

    @line_magic
    @_command(commands.PREDICT)
    def guava_predict(self, args: argparse.Namespace) -> Any:
        """Return the results."""
        return self.session.predict(args, self.panel())

    @line_magic
    @_command(commands.STATUS)
    def guava_status(self, args: argparse.Namespace) -> Any:
        """Show everything there is, or follow the newest run and return it."""
        followed = self.session.newest_followed() if args.follow else None
        if followed is not None:
            return self.followed(followed, followed.run)
        views = self.session.views()
        if not views:
            say("Nothing here yet: %guava_up opens a session, %guava_worker CODE joins one.")
        return self._show(*views)

    @line_magic
    @_command(commands.RUNS)
    def guava_runs(self, args: argparse.Namespace) -> None:
        """Compare runs."""
        runs, more = self.session.runs.chosen(args)

        def png() -> bytes:
            from guava_nb.render.pictures import runs_png  # matplotlib takes a second

            return runs_png(runs, settings_of(self.shell).smoothing)

        said = self.session.runs.export(args, runs, png)
        self._show(runs_view(runs, more))
        if args.runs and choose_ui(self.shell) not in ("text", "none") and settings_of(self.shell).picture:
            show_png(png(), "losses of the runs")
        if said:
            say("\n".join(said))

    @line_magic
    @_command(commands.ENERGY)
    def guava_energy(self, args: argparse.Namespace) -> Any:
        """Show the newest run's energy and return its record."""
        record = self.session.newest_run().energy_record(args.grams_per_kwh, args.price_per_kwh)
        self._show_and_return(energy_view, record)
        if record.curves and choose_ui(self.shell) not in ("text", "none"):
            from guava_nb.render.pictures import watts_png  # matplotlib takes a second

            show_png(watts_png(record.curves), "watts over seconds")
        return record

    @line_magic
    @_command(commands.LOG)
    def guava_log(self, args: argparse.Namespace) -> None:
        """Write workers' lines."""
        lines = self.session.log(args.worker, args.n or settings_of(self.shell).log_lines)
        coming = self.session.new_lines(args.worker)
        say("\n".join(lines) if lines else "No worker has printed anything yet.")
        if args.follow:
            follow_lines(coming, self.session.is_at_work)

    @line_magic
    @_command(commands.SAVE)
    def guava_save(self, args: argparse.Namespace) -> None:
        """Write a checkpoint."""
        path, run = self.session.save(args.path), self.session.newest_run_or_none()
        whose = (
            ""
            if run is None
            else f" of {dict(run.status().settings).get('model', 'the model')}, as {run.run_id} left it,"
        )
        say(
            f"Saved {_size(path)}{whose} to {path}. "
            f"Plain PyTorch reads it: torch.load({str(path)!r}, weights_only=True)['model']"
        )

    @line_magic
    @_command(commands.EXPORT)
    def guava_export(self, args: argparse.Namespace) -> None:
        """Write a plain program of the last run."""
        path = in_a_folder(args.path, "%guava_export")
        run = self.session.newest_run()
        written = run.export(path, form=args.form, overwrite=args.overwrite, save_data=args.save_data)
        say(f"Wrote {written}; how it is started stands at its top.{to_be_filled_in(written)}")

    @line_magic
    @_command(commands.RESUME)
    def guava_resume(self, args: argparse.Namespace) -> None:
        """Load a checkpoint."""
        say(self.session.resume(args))

    @line_magic
    @_command(commands.STOP)
    def guava_stop(self, args: argparse.Namespace) -> None:
        """Stop what runs."""
        say(self.session.stop())

    @line_magic
    @_command(commands.DOWN)
    def guava_down(self, args: argparse.Namespace) -> None:
        """Close everything."""
        say("Closed. %guava_up opens a new session." if self.session.close() else "Nothing was open.")

    @line_magic
    @_command(commands.DOCTOR)
    def guava_doctor(self, args: argparse.Namespace) -> None:
        """Check this machine and the way to a session."""
        self._show(doctor_report(args, self.session.worker.ask_for_code))

    def tell_end(self, result: Any = None) -> None:
        """After each cell: say how a run that no cell shows has ended, and why every cell that needs torch fails."""
        self.session.runs.tell_end()
        self.objects.end_cell()
        if result is None or result.success or not result.info.store_history:  # a shared cell runs within another one
            return
        if (problem := half_loaded_text()) and str(result.error_in_exec) != problem:
            say(problem)

    def close(self) -> None:
        """Close everything this kernel started; also called when it ends. A background session goes on."""
        self.background.leave()
        self.session.close()

    def panel(self, hint: str = "") -> Panel:
        """A panel as this notebook wants it."""
        settings = settings_of(self.shell)
        return make_panel(choose_ui(self.shell), settings.picture, settings.smoothing, hint)

    def followed(self, followed: Followed, run: Any) -> Any:
        """Show a run until it has ended or the cell is interrupted; returns the run."""
        self.objects.shown(self.session.follow_run(followed, run, self.panel(_AGAIN)))
        return run

    def _show(self, *views: View) -> None:
        ui = choose_ui(self.shell)
        for view in views:
            show(view, ui)

    def _show_and_return(self, view: Callable[[Any], View], thing: Any) -> Any:
        self._show(view(thing))
        self.objects.shown(thing)
        return thing

    def _show_code(self) -> None:
        """The secret is written out, because a person asked for it."""
        hand_over(self.session.cell_to_paste(), choose_ui(self.shell))


def load(shell: Any) -> None:
    """Register the magics in a shell; called by `%load_ext guava_nb`. Loading twice changes nothing."""
    if _loaded(shell) is not None:
        return
    magics = GuavaMagics(shell)
    shell.register_magics(magics)
    add_settings(shell)
    install_completion(
        shell,
        commands.COMMANDS,
        {
            "<shared>": lambda begin: magics.session.cells.defined(),
            "<workers>": lambda begin: magics.session.worker_names(),
            "<cells>": lambda begin: magics.session.cells.names(),
            "<names>": lambda begin: names(shell),
            "<runs>": lambda begin: magics.session.runs.names(),
            "<loaders>": lambda begin: loaders(shell),
            "<tunnels>": lambda begin: list(tunnel_names()),
            "<launchers>": lambda begin: [f"{name}:" for name in launcher_names()],
            "<files>": files,
        },
    )
    allow_help_alone(shell)
    shell.events.register("post_run_cell", magics.tell_end)
    atexit.register(magics.close)
    if problem := half_loaded_text():  # by the very first cell, before this one
        say(problem)


def unload(shell: Any) -> None:
    """Close everything this notebook started and take the magics away."""
    magics = _loaded(shell)
    if magics is None:
        return
    atexit.unregister(magics.close)
    magics.objects.forget()
    shell.events.unregister("post_run_cell", magics.tell_end)
    remove_settings(shell)
    remove_completion(shell, commands.COMMANDS)
    forbid_help_alone(shell)
    for kind in ("line", "cell"):
        for command in commands.COMMANDS:
            shell.magics_manager.magics[kind].pop(command.name, None)
    shell.magics_manager.registry.pop(GuavaMagics.__name__, None)
    magics.close()


def _without_body(lines: list[str]) -> list[str]:
    """IPython refuses a cell magic without a cell before it is called, so that it could not even explain itself."""
    if lines and lines[0].startswith("%%guava_") and not any(line.strip() for line in lines[1:]):
        return [lines[0][1:]]
    return lines


def allow_help_alone(shell: Any) -> None:
    """Let `%%guava_share -h` stand alone in its cell."""
    shell.input_transformers_cleanup.append(_without_body)


def forbid_help_alone(shell: Any) -> None:
    """Take that back."""
    if _without_body in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.remove(_without_body)


def _loaded(shell: Any) -> GuavaMagics | None:
    found: GuavaMagics | None = shell.magics_manager.registry.get(GuavaMagics.__name__)
    return found


def _size(path: Path) -> str:
    from guava_nb.render.values import show_bytes

    return show_bytes(path.stat().st_size) if path.exists() else "the checkpoint"
