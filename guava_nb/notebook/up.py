"""%guava_up: from its line to the orchestrator's settings, and the workers that it starts on this machine."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython

from guava_nb.config import DistributedConfig
from guava_nb.config.state_folder import state_folder
from guava_nb.config.units import show_bytes
from guava_nb.doctor.memory import WORKER_BYTES, Memory, check_room_for, memory_here
from guava_nb.errors import AuthenticationError, ClusterError, ConfigError, LinkBroken, LinkTimeout
from guava_nb.launchers.registry import make_launcher
from guava_nb.link.handshake import try_way
from guava_nb.link.options import LinkOptions
from guava_nb.notebook.display import ask_hidden, say
from guava_nb.notebook.host import Host, binder_rule, is_loopback
from guava_nb.processes.gpu_driver import check_device
from guava_nb.protocol.joincode import JoinCode
from guava_nb.spec.loading import half_loaded_text, loading_without_collections
from guava_nb.tunnels.registry import make_tunnel
from guava_nb.tunnels.tokens import find_token

__all__ = [
    "LocalWorkers",
    "cautions",
    "dial_workers",
    "first_settings",
    "goes_on_notes",
    "look_at_tunnel",
    "held_run",
    "lost_run",
    "memory_caution",
    "new_orchestrator",
    "orchestrator_settings",
    "session_file",
    "start_elsewhere",
    "start_worker",
]

#: What is told where the session of a kernel that was killed or started anew goes on.
_GOES_ON = (
    "The last session of this notebook was not closed, so it goes on here with the same join code: workers on other machines "
    "that still wait for it come back by themselves. %guava_down ends it."
)
_MOVED = (
    "The last session of this notebook was not closed, so it goes on here. Another program has its port, so its join code has "
    "changed: workers on other machines come back as soon as they get the new code (%guava_worker CODE). %guava_down ends it."
)
_RUN_GOES_ON = (
    "Its last run can go on where it stood, as soon as one of its workers is back: the same line of %guava_train with --resume "
    "session and without --fresh."
)
_LOCAL_ENDED = (
    "The workers that it had started on this machine ended with its kernel: %guava_up --local 1 starts one again."
)
_TWO = (
    "Another kernel has a session of this notebook open (where Jupyter does not tell the notebook's name: of this folder). This "
    "is a second one with a join code of its own, and workers of the other stay there. To go on with that one: shut the other "
    "kernel down, then %guava_down and %guava_up here."
)
#: Seconds in which a session that is there has answered.
TRY_S = 4.0
#: Seconds that workers started on this machine get to load torch and join.
LOCAL_JOIN_S = 180.0


def new_orchestrator(**settings: Any) -> Any:
    """Make the orchestrator of this notebook.

    Raises:
        UsageError: torch is half loaded here.
        ConfigError: a setting is wrong.
    """
    load_torch()
    from guava_nb.orchestrator import Orchestrator

    config = DistributedConfig.load(**settings)
    return Orchestrator(config if config.session_file else config.replace(session_file=_usable_session_file()))


def _usable_session_file() -> str:
    """This notebook's session file; "off", told, where it cannot be kept: a full or read-only home stops no session."""
    from guava_nb.cluster.session_file import SessionFile

    try:
        taken = SessionFile.take(session_file())
    except ConfigError as problem:
        say(f"This session will end with its kernel: {problem}.")
        return "off"
    taken.release(forget=False)
    if taken.path != session_file():
        say(_TWO)
    return str(session_file())


def look_at_tunnel(tunnel: str | None, ask: Callable[[], str] | None) -> Callable[[], str] | None:
    """Find out before torch is loaded, which takes seconds, whether a tunnel can be named so and has its authtoken.

    Args:
        tunnel: as on the line; None: that of the configuration.
        ask: asks for an authtoken; None where no person can be asked.

    Returns:
        What gives the authtoken from now on, without asking twice; None as `ask`.

    Raises:
        ConfigError: no tunnel has that name, or its authtoken is missing or cannot be one.
    """
    text = tunnel or DistributedConfig.load().tunnel
    if not text or make_tunnel(text).name not in ("ngrok", "ngrok-http"):
        return ask
    found = find_token(None, ask)
    return None if ask is None else lambda: found.token


def start_worker(code: str, device: str, name: str | None) -> Any:
    """Start the worker of this notebook, if its session answers: a process takes seconds to load torch and to find out.

    Raises:
        ClusterError: no listener is there, or that of another session.
        ConfigError: the device is not here.
        GuavaError: as for `new_orchestrator`.
    """
    _check_whole()
    check_device(device)
    try:
        with contextlib.suppress(LinkTimeout):  # slow, or gone: the worker is more patient
            try_way(JoinCode.decode(code), LinkOptions(connect_timeout_s=TRY_S), TRY_S)
    except (LinkBroken, AuthenticationError) as error:
        why = str(error).rstrip(".")
        raise ClusterError(f"the worker did not join: {why}; %guava_doctor CODE says which step fails") from None
    load_torch()
    from guava_nb.worker.network_worker import start_worker as start

    return start(code, device=device, name=name, config=DistributedConfig.load())


def _check_whole() -> None:
    if problem := half_loaded_text():
        raise UsageError(problem)


def load_torch() -> None:
    """Load torch and what trains with it; an interrupt waits for the end of that, which takes some seconds."""
    _check_whole()
    with loading_without_collections():
        import guava_nb.orchestrator
        import guava_nb.worker.network_worker  # noqa: F401


def orchestrator_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What was given on the line; defaults, environment and files are the configuration's business."""
    if args.workers is not None and (args.local or 0) > args.workers:
        raise ConfigError(
            f"--local {args.local} starts more workers than --workers {args.workers} expects: give --workers {args.local}, "
            "or leave it out"
        )
    if args.on:
        make_launcher(args.on)  # refuses what it cannot do with before a session is opened for it
    given = {
        "master_ip": args.host,
        "master_port": args.port,
        "num_workers": args.workers,
        "compression": args.compression,
        "prefetch_bytes": None if args.prefetch_mb is None else args.prefetch_mb << 20,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    if args.no_tls:
        settings["tls"] = False
    return settings


def first_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the workers that a line starts make of a session's settings, where the line says nothing else."""
    expected = {"num_workers": args.local} if args.local else {}
    # Once the session stands the line's are started: a start that fails leaves it open.
    return {**expected, "workers_on": ""} if args.on else expected


def cautions(args: argparse.Namespace, host: Host, running: int) -> list[str]:
    """What a person should read before this line of %guava_up is done, because afterwards may be too late.

    Args:
        running: workers that this notebook started and that live.

    Raises:
        ConfigError: this machine can never hold the workers that the line starts here.
    """
    memory = memory_here()
    check_room_for(args.local or 0, "--local", memory)
    said = [binder_rule(host)] if host is Host.BINDER and _reaches_beyond(args, running) else []
    missing = (args.local or 0) - running
    return [text for text in (*said, memory_caution(missing, memory) if missing > 0 else "") if text]


def memory_caution(count: int, memory: Memory) -> str:
    """A sentence for the case that so many more workers on this machine may not fit; an empty string where they do."""
    if count * WORKER_BYTES <= memory.free_bytes:
        return ""
    whose = " that this host gives" if memory.is_limited else ""
    fitting = memory.free_bytes // WORKER_BYTES
    return (
        f"Memory is short: a worker takes about {show_bytes(WORKER_BYTES)} beside its model, and "
        f"{show_bytes(memory.free_bytes)} are free of the {show_bytes(memory.total_bytes)}{whose}: room for {fitting}, not for "
        f"{count} more. Where memory runs out the system ends a worker or this kernel; %guava_up --local N with a smaller N "
        "needs less."
    )


def _reaches_beyond(args: argparse.Namespace, running: int) -> bool:
    """Whether the session is meant for others than the workers that this notebook starts."""
    config = DistributedConfig.load()
    tunnel, address = args.tunnel or config.tunnel, args.host or config.master_ip
    here = max(args.local or 0, running)
    others = bool(args.on) or not here or (args.workers or 0) > here or args.connect is not None
    return others or tunnel not in ("", "local") or not is_loopback(address)


def dial_workers(orchestrator: Any, words: Sequence[str] | None, shell: object) -> list[str]:
    """Dial the worker that listens, where --connect was given; returns a sentence on each that is connected.

    Raises:
        UsageError: there is no join code.
        GuavaError: it cannot be dialled.
    """
    if words is None:
        return []
    return [f"{name} is connected." for name in orchestrator.connect(_code_to_dial(words, shell))]


def _code_to_dial(words: Sequence[str], shell: object) -> str:
    """The join code of --connect, else of GUAVA_JOIN_CODE, else what is typed into a hidden prompt.

    The variable is removed, so that no code that runs later in this process or its children finds it.

    Raises:
        UsageError: there is none.
    """
    from_environment = os.environ.pop("GUAVA_JOIN_CODE", "")
    text = " ".join(words) or from_environment or ask_hidden("Join code of the worker that listens: ", shell)
    if not text.strip():
        raise UsageError(
            "--connect needs the join code that the listening worker shows: %guava_up --connect guava1:..."
        )
    return text


def goes_on_notes(orchestrator: Any, started: int) -> list[str]:
    """Sentences on what goes on of the session of an ended kernel; none where this one is new.

    Args:
        started: workers that are started here now.
    """
    if not orchestrator.goes_on:
        return []
    notes = [_MOVED if orchestrator.has_moved and orchestrator.tunnel is None else _GOES_ON]
    if orchestrator.local_before and not started:
        notes.append(_LOCAL_ENDED)
    if lost := lost_run(orchestrator):
        notes.append(f"{lost[:1].upper()}{lost[1:]}.")
    elif orchestrator.run_path.exists():
        notes.append(_RUN_GOES_ON)
    return notes


def lost_run(orchestrator: Any) -> str:
    """A sentence where only workers that ended with the last kernel had what its last run trained; "" elsewhere."""
    if not orchestrator.local_before:
        return ""
    from guava_nb.orchestrator.run_record import LastRun

    return LastRun.lost(orchestrator.run_path, orchestrator.local_before)


def held_run(orchestrator: Any) -> str:
    """A sentence where a new run would give up what the last kernel's run trained, which workers may hold and no file has."""
    if not orchestrator.goes_on or orchestrator.run is not None or lost_run(orchestrator):
        return ""
    from guava_nb.orchestrator.run_record import LastRun

    return LastRun.held(orchestrator.run_path)


def session_file() -> Path:
    """Return where this notebook's session is kept while its kernel is started anew: one file for each notebook.

    Jupyter names the notebook in JPY_SESSION_NAME and VS Code in a variable; without them the folder tells notebooks apart.
    """
    shell = get_ipython()
    named = os.environ.get("JPY_SESSION_NAME") or (shell and shell.user_ns.get("__vsc_ipynb_file__"))
    name = str(named or Path.cwd())
    return state_folder() / f"session-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"


def start_elsewhere(orchestrator: Any, args: argparse.Namespace, tell: Callable[[str], None]) -> list[str]:
    """Start the workers of --on, unless they were started by the same text before; wait for those that no queue holds back.

    Returns:
        Sentences on what was started, and on what is still to come.

    Raises:
        ConfigError: something that it needs is missing, or the workers have ended again; the session stays open.
    """
    if not args.on:
        return []
    if orchestrator.launched(args.on) is not None:
        return [f"--on {args.on} was started already; %guava_down ends it."]
    local, before = args.local or 0, len(orchestrator.status().workers)
    tell(f"Starting workers by {args.on.partition(':')[0]}.")
    launcher = orchestrator.launch_on(args.on)
    if args.workers is None:
        orchestrator.expect_workers(launcher.count + max(local, before))
    if not launcher.is_prompt:
        return ["They join when they are started there: %guava_train waits for them, %guava_status shows who is here."]
    wanted = launcher.count + before
    here = orchestrator.wait_for_launched(wanted, LOCAL_JOIN_S)
    if here < wanted:
        return [f"{here} of {wanted} workers are here; the others join as soon as they can (%guava_status shows them)."]
    return []


class _OthersChanged(Exception):
    """Workers from elsewhere came or went while those of this machine were waited for."""


class LocalWorkers:
    """The workers that this notebook started for its session.

    Args:
        orchestrator: that they work for.
    """

    def __init__(self, orchestrator: Any) -> None:
        self._orchestrator = orchestrator
        self._handles: list[Any] = []
        self._most = 0

    def __len__(self) -> int:
        """How many of them live."""
        self._handles = [handle for handle in self._handles if handle.alive]
        return len(self._handles)

    def start(self, wanted: int, tell: Callable[[str], None] = lambda sentence: None) -> None:
        """Start what is missing of `wanted`, and wait until all of them have joined; one that died is replaced.

        Args:
            tell: called with a sentence before it starts any: they take seconds.

        Raises:
            RendezvousTimeout: some have not joined in time.
        """
        self._most = max(self._most, wanted)
        if (missing := wanted - len(self)) > 0:
            tell(f"Starting {missing} worker{'' if missing == 1 else 's'} here; this takes some seconds.")
            self._handles += self._orchestrator.launch_workers(missing)  # its notice says what they take
        deadline = time.monotonic() + LOCAL_JOIN_S
        # Workers from elsewhere may be here, and come and go meanwhile: they are not those waited for.
        while wanted and len(self._ready()) < (count := len(self._others()) + wanted):
            with contextlib.suppress(_OthersChanged):
                left_s = max(0.0, deadline - time.monotonic())
                self._orchestrator.wait_for_workers(
                    count=count, timeout=left_s, on_wait=partial(self._recount, count - wanted)
                )

    def _recount(self, others: int, _there: int) -> None:
        if len(self._others()) != others:
            raise _OthersChanged

    @property
    def are_all(self) -> bool:
        """Whether every worker that is here or expected is one to start here, also if it died: then no one needs the code."""
        return self._most >= max(1, self._orchestrator.expected_workers) and not self._others()

    def _others(self) -> list[str]:
        ours = {handle.status().name for handle in self._handles}
        return [name for name in self._ready() if name not in ours]

    def _ready(self) -> list[str]:
        workers = self._orchestrator.status().workers
        return [worker.name for worker in workers if worker.state in ("ready", "working")]
