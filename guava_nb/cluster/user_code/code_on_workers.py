"""Any code of the user's on the workers of a session: cells, values there and back, packages, files."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from guava_nb import errors
from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.user_code.code_job import Answer, CodeJob, OnOutput
from guava_nb.cluster.user_code.program_job import Program, ProgramJob
from guava_nb.config.units import show_bytes
from guava_nb.errors import ClusterError, ConfigError, GuavaError, RemoteError, RemoteProtocolError, WorkerLost
from guava_nb.protocol.messages import CodeRan, InstallPackages, Message, PlaceFiles, RunCode
from guava_nb.spec.cell_checks import check_syntax
from guava_nb.spec.plain_values import pack_values, unpack_values
from guava_nb.spec.user_files import read_files

__all__ = ["CodeOnWorkers"]

#: Of values that go to a worker, or come from it, at one time.
_MOST_BYTES = 2 << 30
#: Workers whose own errors are told beside the first one's, and characters of what each says: their tracebacks follow.
_MOST_OTHERS, _MOST_OF_OTHERS = 3, 300
#: Another process may have used this session's numbers before: workers outlive it.
_ids = itertools.count(1 + secrets.randbits(48))
_Payload = Sequence[memoryview]


def _quiet(worker: str, lines: Sequence[str]) -> None:
    """Show nothing: `log()` has what workers print."""


class CodeOnWorkers:
    """What a session lets its user do on its workers while no run is in progress.

    Joining a session grants its owner this, as it grants the code of a run. In all methods `on` names the workers, None for
    all that are connected, and `on_output(worker, lines)` gets what they print meanwhile. An interrupt stops the code there
    and then raises KeyboardInterrupt here; the workers stay in the session.
    """

    _open_cluster: Callable[[], Cluster]

    def _check_idle(self) -> None:
        """Raise where a run is in progress."""

    def _empty_groups(self) -> None:
        """Have workers leave the process groups of runs that are over: a process is in one at a time."""

    def run_code(
        self, text: str, on: Sequence[str] | None = None, *, cell: str = "px", on_output: OnOutput = _quiet
    ) -> dict[str, Any]:
        """Run Python source on workers, in one namespace per worker that stays until its process ends.

        `device`, `worker` and `rank` are defined there.

        Args:
            on: names of workers; None: all that are connected.
            on_output: gets a worker's name and lines that it printed, as they come.
            text: the source; it sees what cells before it and `push` defined, and nothing of this process.
            cell: its name in tracebacks.

        Returns:
            By worker, the value of the last expression; None where it has none, or ends with a semicolon. What is not plain
            data arrives as what it shows of itself.

        Raises:
            SourceError: the text is no Python.
            RemoteError: it raised; with the traceback of the first worker, and what the others raised.
            ClusterError: a run is in progress, or no worker is here.
            WorkerLost: a worker was lost meanwhile.
            ConfigError: no worker of this name, or the value is too large.
        """
        check_syntax(cell, text, "%%guava_px")
        return {worker: values.get("") for worker, values in self._run(text, {}, (), on, cell, on_output).items()}

    def run_program(
        self,
        text: str,
        *arguments: str,
        on: Sequence[str] | None = None,
        name: str = "program",
        path: str = "auto",
        on_output: OnOutput = _quiet,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Run a torch.distributed program on workers, one rank each, and wait for its end.

        It finds what torchrun would give it (RANK, WORLD_SIZE, LOCAL_RANK, `__main__`), and whatever backend its
        `init_process_group` names it gets a group of these workers. It runs where `run_code` does: what was pushed or defined
        there before is there, and what it defines can be pulled. Where one rank fails or is lost, all others are ended.

        Args:
            on: names of workers; None: all that are connected.
            on_output: gets a worker's name and lines that it printed, as they come.
            text: its source.
            arguments: its command line.
            name: in tracebacks.
            path: "relay" goes through this machine, "direct" between the workers (NCCL, gloo), "auto" chooses.
            on_wait: called a few times a second meanwhile.

        Raises:
            SourceError: the text is no Python.
            RemoteError: a rank raised; with the traceback of the rank that failed first.
            ClusterError: a run is in progress, no worker is here, or the direct path is not open.
            WorkerLost: a worker was lost meanwhile.
            ConfigError: no worker of this name.
        """
        check_syntax(name, text, "%%guava_run")
        ranks = self._ranks(on)
        self._empty_groups()
        cluster = self._open_cluster()
        job = ProgramJob(
            cluster, {}, on_output, on_wait,
            program=Program(name, text, arguments, path), ranks=ranks, request_id=next(_ids),
        )  # fmt: skip
        job.run()
        if job.was_interrupted or not job.causes():  # a worker that was lost is why others report a broken group
            _check_ended(cluster, job, on_output)
        _raise_failure({cluster.name(rank): report for rank, report in (job.causes() or job.failed()).items()})

    def push(
        self, values: Mapping[str, Any], on: Sequence[str] | None = None, *, on_output: OnOutput = _quiet
    ) -> list[str]:
        """Set names on workers; returns the workers. One that joins later does not get them.

        Args:
            on: names of workers; None: all that are connected.
            on_output: gets a worker's name and lines that it printed, as they come.
            values: numbers, text, lists, dicts, times, tensors, arrays and tables of pandas, polars and pyarrow, by name.

        Raises:
            ConfigError: a value is not plain data; or as for `run_code`.
        """
        for name in values:
            if not name.isidentifier():
                raise ConfigError(f"{name!r} is no name that a value can have; give one of letters, digits and _")
        return list(self._run("", values, (), on, "push", on_output))

    def pull(
        self, *names: str, on: Sequence[str] | None = None, on_output: OnOutput = _quiet
    ) -> dict[str, dict[str, Any]]:
        """Return the values of names on workers, by worker and name; tensors arrive on the CPU.

        Args:
            names: that code there has defined.
            on, on_output: as for `run_code`.

        Raises:
            ConfigError: a worker does not have the name, or the values are too large; or as for `run_code`.
        """
        return self._run("", {}, names, on, "pull", on_output)

    def install(self, *packages: str, on: Sequence[str] | None = None, on_output: OnOutput = _quiet) -> dict[str, str]:
        """Have pip install packages at workers; torch, numpy and all that is loaded there keep their versions.

        Args:
            packages: as pip takes them, without options.
            on, on_output: as for `run_code`.

        Returns:
            By worker, what was installed.

        Raises:
            ConfigError: pip refused, and why; or as for `run_code`.
        """
        if not packages or any(not word.strip() or word.startswith("-") for word in packages):
            raise ConfigError("name the packages to install, as in %guava_pip einops; options of pip are not taken")
        waves: list[dict[int, Message]] = []
        of_host: dict[str, int] = {}
        cluster = self._open_cluster()
        for rank in self._ranks(on):  # workers of one machine may share an environment: one after the other
            host = cluster.roster.members[rank].hello.host_id or str(rank)
            wave = of_host[host] = of_host.get(host, -1) + 1
            waves += [{}] if wave == len(waves) else []
            waves[wave][rank] = InstallPackages(next(_ids), packages)
        told: dict[str, dict[str, Any]] = {}
        for orders in waves:
            told |= self._asked({rank: (message, ()) for rank, message in orders.items()}, on_output)
        return {worker: str(values[""]) for worker, values in told.items()}

    def send_files(
        self, *paths: str | Path, on: Sequence[str] | None = None, on_output: OnOutput = _quiet
    ) -> dict[str, str]:
        """Put the user's own modules, text files and folders of them, where code at workers can import them.

        Sent again, a module that changed is loaded anew there. Workers that join later get those that were sent to all.

        Args:
            paths: of text files and folders here.
            on, on_output: as for `run_code`.

        Returns:
            By worker, what is new, changed and loaded anew.

        Raises:
            ConfigError: a path is not there or no text, they are too large, or would hide a package; or as for `run_code`.
        """
        files, notes = read_files(paths)
        if not files:
            raise ConfigError(f"there is no text file to send: {'; '.join(notes) or 'name files or folders'}")
        orders = {rank: (PlaceFiles(next(_ids), files), ()) for rank in self._ranks(on)}
        if notes:
            on_output("", notes)
        told = self._asked(orders, on_output)
        if on is None:
            cluster = self._open_cluster()
            new = {file.path for file in files}
            kept = [
                f
                for order in cluster.greetings
                if isinstance(order, PlaceFiles)
                for f in order.files
                if f.path not in new
            ]
            cluster.greetings = (PlaceFiles(next(_ids), (*kept, *files)),)
        return {worker: str(values[""]) for worker, values in told.items()}

    def _ranks(self, on: Sequence[str] | None) -> list[int]:
        """Seats of the workers that are meant."""
        cluster = self._open_cluster()
        self._check_idle()
        ready = {cluster.name(rank): rank for rank in cluster.roster.ready()}
        if not ready:
            raise ClusterError(
                "no worker is here: run %guava_worker with the join code elsewhere, or start some here with %guava_up --local 2"
            )
        for name in on or ():
            if name not in ready:
                raise ConfigError(f"no worker that is connected is called {name!r}; there are: {', '.join(ready)}")
        return list(ready.values()) if on is None else [ready[name] for name in on]

    def _run(
        self, text: str, values: Mapping[str, Any], wanted: Sequence[str], on: Sequence[str] | None, cell: str,
        on_output: OnOutput,
    ) -> dict[str, dict[str, Any]]:  # fmt: skip
        ranks, (tree, buffers) = self._ranks(on), pack_values(values, strictly=True)
        if (nbytes := sum(buffer.nbytes for buffer in buffers)) > _MOST_BYTES:
            raise ConfigError(
                f"{', '.join(values)}: {show_bytes(nbytes)}; at most {show_bytes(_MOST_BYTES)} may go at one time: push parts"
            )
        if not ranks:
            return {}
        orders: dict[int, tuple[Message, _Payload]] = {
            rank: (
                RunCode(
                    request_id=next(_ids), cell=cell, text=text, values=tree, wanted=tuple(wanted), rank=rank,
                    most_bytes=_MOST_BYTES,
                ),
                buffers,
            )
            for rank in ranks
        }  # fmt: skip
        return self._asked(orders, on_output)

    def _asked(self, orders: Mapping[int, tuple[Message, _Payload]], on_output: OnOutput) -> dict[str, dict[str, Any]]:
        """Ask, and wait; returns values by worker and name. Without values "" is the sentence that came."""
        cluster = self._open_cluster()
        job = CodeJob(cluster, orders, on_output)
        job.run()
        _check_ended(cluster, job, on_output)
        _raise_failure({cluster.name(rank): answer.ran for rank, answer in job.answers.items() if answer.ran})
        return {cluster.name(rank): _values(cluster, rank, answer) for rank, answer in job.answers.items()}


def _check_ended(cluster: Cluster, job: CodeJob, on_output: OnOutput) -> None:
    """Raise what the user did, or what became of workers, where that kept the code from its end."""
    missing = [
        f"{cluster.name(rank)} ({cluster.roster.members[rank].detail or 'no answer yet'})" for rank in job.missing()
    ]
    if job.was_interrupted:
        if missing:
            told = f"No longer waited for: {', '.join(missing)}; further work there begins when that code ends."
            on_output("", [told])
        raise KeyboardInterrupt
    if missing:
        raise WorkerLost(f"lost while the user's code ran there, so how it ended is not known: {', '.join(missing)}")


def _values(cluster: Cluster, rank: int, answer: Answer) -> dict[str, Any]:
    if answer.values is None:
        return {"": answer.ran.text if answer.ran is not None and answer.ran.text else None}
    try:
        return unpack_values(*answer.values)
    except RemoteProtocolError as error:
        cluster.expel(rank, f"values that cannot be read: {error}")
        raise WorkerLost(
            f"{cluster.name(rank)} sent values that cannot be read, and its session was ended: {error}"
        ) from error


def _first_line(text: str) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= _MOST_OF_OTHERS else f"{line[:_MOST_OF_OTHERS]} ..."


def _raise_failure(ran: Mapping[str, CodeRan]) -> None:
    """Raise what workers raised, as one error: equal ones together."""
    failed = {worker: report for worker, report in ran.items() if report.type_name}
    if not failed:
        return
    first = next(iter(failed.values()))
    same = [
        worker for worker, report in failed.items() if (report.type_name, report.text) == (first.type_name, first.text)
    ]
    others = {worker: report for worker, report in failed.items() if worker not in same}
    further = list(others)[_MOST_OTHERS:]
    others = {worker: others[worker] for worker in list(others)[:_MOST_OTHERS]}
    rest = "".join(f"; {worker}: {report.type_name}: {_first_line(report.text)}" for worker, report in others.items())
    rest += f"; others on {', '.join(further)}: run it there alone (--on NAME) to see them" if further else ""
    kind = getattr(errors, first.type_name, None)
    if isinstance(kind, type) and issubclass(kind, GuavaError) and kind is not RemoteError:
        raise kind(f"worker {', '.join(same)}: {first.text}{rest}")
    traces = [first.traceback, *(f"Traceback on {worker}:\n{report.traceback}" for worker, report in others.items())]
    raise RemoteError(", ".join(same), first.type_name, first.text + rest, "\n".join(traces))
