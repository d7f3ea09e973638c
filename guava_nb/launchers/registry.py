"""From the text `NAME:WHAT` to a launcher: ours by name, other packages' by entry point.

A class is imported when it is named, so that a launcher never needs what another one is built on.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from guava_nb.config.values import near
from guava_nb.errors import ConfigError, GuavaError
from guava_nb.launchers.launcher import Launcher

__all__ = ["GROUP", "launcher_class", "launcher_names", "make_launcher"]

#: Entry points of this group name subclasses of `Launcher`.
GROUP = "guava_nb.launchers"
#: Module and class of each of ours; pyproject.toml has the same table as entry points.
_OURS = {
    "ssh": ("ssh", "SshLauncher"),
    "slurm": ("slurm", "SlurmLauncher"),
    "k8s": ("k8s", "KubernetesLauncher"),
    "docker": ("docker", "DockerLauncher"),
    "ray": ("ray", "RayLauncher"),
}


def make_launcher(text: str) -> Launcher:
    """Make the launcher that a text such as `ssh:host1,host2` or `slurm:8,gpus=1` names; starts nothing.

    Raises:
        ConfigError: no launcher has that name, or it cannot do with what stands behind the colon.
    """
    name, _, what = text.strip().partition(":")
    kind = launcher_class(name.strip())
    try:
        return kind(what.strip())
    except GuavaError:
        raise  # its own sentence
    except Exception as problem:  # whatever another package's code may raise
        raise ConfigError(
            f'the launcher "{name}" cannot be used: {type(problem).__name__}: {" ".join(str(problem).split())}'
        ) from problem


def launcher_class(name: str) -> type[Launcher]:
    """The class of a launcher.

    Raises:
        ConfigError: none has that name, or it cannot be imported; the message names its package.
    """
    if name in _OURS:
        module, kind = _OURS[name]
        found: type[Launcher] = getattr(import_module(f"guava_nb.launchers.{module}"), kind)
        return found
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            return _load(entry)
    known = launcher_names()
    raise ConfigError(
        f'--on: nothing starts workers by the name "{name}".{near(name.lower(), known)} There are: {", ".join(known)}'
    )


def launcher_names() -> list[str]:
    """Names of all launchers: ours, then other packages' in alphabetical order."""
    return [*_OURS, *sorted({entry.name for entry in entry_points(group=GROUP)} - set(_OURS))]


def _load(entry: EntryPoint) -> type[Launcher]:
    package = entry.dist.name if entry.dist is not None else entry.module
    try:
        found = entry.load()
    except Exception as problem:  # whatever another package's import may raise
        raise ConfigError(
            f'the launcher "{entry.name}" of the package {package} cannot be used: {type(problem).__name__}: '
            f"{' '.join(str(problem).split())}; update or uninstall {package}"
        ) from problem
    if not (isinstance(found, type) and issubclass(found, Launcher)):
        raise ConfigError(
            f'the launcher "{entry.name}" of the package {package} is no subclass of guava_nb.launchers.Launcher; '
            f"update or uninstall {package}"
        )
    return found
