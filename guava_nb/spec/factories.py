"""Names and arguments from a run's record turned into objects, with errors that help.

Knows torch's own names and a `resolve` callable for shared or importable ones; knows nothing of where those come from.
A wrong name or argument is the user's mistake and becomes a ConfigError before anything trains; an exception inside the
user's own function becomes a PreparationError with the exception chained. An ImportError passes as it is: the caller
turns its module name into an install line.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from guava_nb.errors import CellLeftOut, ConfigError, GuavaError, PreparationError

__all__ = ["Resolve", "build", "check_arguments", "find", "near"]

#: Returns the shared or importable object of a name; raises GuavaError, LookupError or AttributeError if there is none.
Resolve = Callable[[str], object]


def near(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'X'?)" for the known name closest to `name`, else an empty text.

    People leave out the end ("CrossEntropy") or the beginning ("Plateau") of a name more often than they mistype it, or say
    where it lies ("optim.Adam"). So of the known names the shortest that begins with theirs comes first.
    """
    lower = {candidate.lower(): candidate for candidate in known}
    part = re.split(r"[.:]", name.lower())[-1]
    begins = sorted((one for one in lower if one.startswith(part) and len(part) >= 2), key=len)
    holds = [one for one in lower if part in one and len(part) >= 3]
    match = [*begins, *(holds if len(holds) == 1 else ()), *difflib.get_close_matches(part, lower, n=1, cutoff=0.6)]
    return f" (did you mean {lower[match[0]]!r}?)" if match else ""


def find(
    role: str, name: str, torch_names: Mapping[str, Callable[..., Any]], where: str, resolve: Resolve
) -> Callable[..., Any]:
    """Return what `name` stands for: torch's own names first, then shared and importable ones.

    Args:
        role: what it is for, in the user's words: "optimizer", "criterion".
        name: the name asked for.
        torch_names: names that torch gives this role.
        where: where torch keeps them, for the message.
        resolve: finds shared and importable objects.

    Raises:
        ConfigError: the name is not known; the message gives the nearest one.
    """
    if name in torch_names:
        return torch_names[name]
    try:
        found = resolve(name)
    except (ImportError, CellLeftOut):
        raise
    except (GuavaError, LookupError, AttributeError) as error:
        short = name.rpartition(".")[2]
        if where and short != name and short in torch_names and f".{where}.{short}".endswith(f".{name}"):
            raise ConfigError(f"{role} {name!r}: names of {where} stand alone here (did you mean {short!r}?)") from None
        names = [one for one in torch_names if one[0].isupper()]  # classes, whose functions are called much the same
        hint = near(name, names) or (f" (there are: {', '.join(names)})" if where else "")
        tail = f"{hint}, and it is no shared name: {error}" if where else f": {error}"
        start = f"{role} {name!r} is not in {where}" if where else f"{role} {name!r} cannot be found"
        raise ConfigError(f"{start}{tail}") from error
    if not callable(found):
        raise ConfigError(
            f"{role} {name!r} is a {type(found).__name__}, which cannot be called; share a class or a function"
        )
    return found


def check_arguments(role: str, name: str, function: Callable[..., Any], given: int, args: Mapping[str, Any]) -> None:
    """Check that `function` can be called with `given` positional arguments and these named ones.

    Raises:
        ConfigError: it cannot; the message lists what it takes and names the nearest argument.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature says so itself when it is called
        return
    try:
        signature.bind(*[None] * given, **args)
    except TypeError as error:
        accepted = [
            p.name
            for p in list(signature.parameters.values())[given:]
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        by_place = [
            p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        is_open = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
        unknown = [key for key in args if key not in accepted]
        takes = ", ".join(accepted) or "no named arguments"
        if unknown:
            text = f"{role} {name} does not take {unknown[0]!r}{near(unknown[0], accepted)}; it takes: {takes}"
        elif len(by_place) < given and not is_open:
            text = f"{role} {name} is called with {given} arguments and takes {len(by_place)}: {', '.join(by_place) or 'none'}"
        else:
            text = f"{role} {name}: {error}; it takes: {takes}"
        raise ConfigError(text) from None


def build(
    role: str, name: str, function: Callable[..., Any], *positional: Any, from_torch: bool, args: Mapping[str, Any]
) -> Any:
    """Call a factory and return what it made.

    Raises:
        ConfigError: the arguments do not fit, or torch refuses their values.
        PreparationError: the user's own code raised; the exception is chained.
    """
    check_arguments(role, name, function, len(positional), args)
    try:
        return function(*positional, **args)
    except (ImportError, GuavaError):
        raise
    except (Exception, SystemExit) as error:
        if from_torch:
            raise ConfigError(f"{role} {name} refuses its arguments {dict(args)}: {error}") from error
        raise PreparationError(f"{role} {name!r} raised {type(error).__name__}: {error}") from error
