"""Which program is the ngrok agent: named, found, or fetched by pyngrok; and that it is one that still works."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from guava_nb.errors import ConfigError

__all__ = ["agent_version", "find_agent", "load_pyngrok", "required_agent"]

#: Seconds for the agent to say its version, and for one step of its download.
VERSION_S = 15.0
DOWNLOAD_S = 20.0

_GET_ONE = "install one from https://ngrok.com/download, or set NGROK_PATH to one"


#: How urllib writes what the system said.
_URLLIB = re.compile(r"<urlopen error (?:\[Errno -?\d+\] )?(.*?)>")


def find_agent() -> str | None:
    """Path of the agent that would be used; None where the first start would fetch one.

    Raises:
        ConfigError: pyngrok is missing, or a variable names a file that is not there.
    """
    for variable in ("NGROK_PATH", "PYNGROK_NGROK_PATH"):
        if path := os.environ.get(variable):
            if not Path(path).expanduser().is_file():
                raise ConfigError(f"{variable} is {path}, and there is no such file: correct it, or unset it")
            return str(Path(path).expanduser())
    for folder in os.get_exec_path():
        found = shutil.which("ngrok", path=folder)
        if found and not _belongs_to_pyngrok(found):
            return found
    fetched = str(load_pyngrok().conf.DEFAULT_NGROK_PATH)
    return fetched if os.path.isfile(fetched) else None


def agent_version(path: str) -> str:
    """The version that an agent tells, as in "3.22.1".

    Raises:
        ConfigError: it does not run, is no ngrok agent, or is one of version 2, which ngrok and pyngrok no longer serve.
    """
    version = _asked_version(path, os.stat(path).st_mtime_ns)
    if int(version.split(".")[0]) < 3:
        raise ConfigError(
            f"the ngrok agent at {path} has version {version}, and only 3 and newer work: run `{path} update`, "
            f"remove it so that a new one is fetched, or set NGROK_PATH to another one"
        )
    return version


@functools.lru_cache(maxsize=8)
def _asked_version(path: str, _: int) -> str:
    try:
        done = subprocess.run([path, "version"], capture_output=True, text=True, timeout=VERSION_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the ngrok agent at {path} did not tell its version in {VERSION_S:g} s: {_GET_ONE}"
        ) from None
    except OSError as problem:  # no right to run it, or made for another machine
        raise ConfigError(f"the ngrok agent at {path} cannot be run ({problem.strerror}): {_GET_ONE}") from problem
    told = re.search(r"version (\d+(?:\.\d+)*)", done.stdout + done.stderr)
    if told is None:
        raise ConfigError(f"{path} is no ngrok agent: asked for its version, it told none; {_GET_ONE}")
    return told[1]


def _belongs_to_pyngrok(path: str) -> bool:
    """Whether this is the small command that pyngrok installs under the agent's name."""
    with contextlib.suppress(OSError):
        return os.path.getsize(path) < 1 << 20 and b"pyngrok" in Path(path).read_bytes()
    return True


def required_agent() -> str:
    """Path of an agent that works, fetched where there is none.

    Raises:
        ConfigError: there is none and none can be fetched, or it does not work.
    """
    path = find_agent()
    if path is None:
        pyngrok = load_pyngrok()
        path = str(pyngrok.conf.DEFAULT_NGROK_PATH)
        try:
            _quieten(pyngrok.installer)
            pyngrok.installer.install_ngrok(path, timeout=DOWNLOAD_S)
        except (pyngrok.exception.PyngrokError, OSError, ValueError) as problem:
            reason = _URLLIB.sub(r"\1", " ".join(str(problem).split()))
            raise ConfigError(
                f"the ngrok agent could not be fetched ({reason}): is there a network? Else {_GET_ONE}"
            ) from problem
    agent_version(path)
    return path


def _quieten(installer: Any) -> None:
    """Its progress and its warning about a second try would stand between the lines of a cell that says all that itself."""
    installer._print_progress_enabled = False
    logger = logging.getLogger(installer.__name__)
    if not any(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
        logger.addHandler(logging.NullHandler())  # who configured logging gets it all the same


def load_pyngrok() -> Any:
    """pyngrok, with the modules that are used here.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import pyngrok
        import pyngrok.conf
        import pyngrok.exception
        import pyngrok.installer
        import pyngrok.ngrok
        import pyngrok.process
    except ImportError as problem:
        other = "" if find_spec("ngrok") is None else ' (the package "ngrok", which is installed, is another one)'
        raise ConfigError(f"the package pyngrok cannot be imported{other}: run %pip install pyngrok") from problem
    return pyngrok
