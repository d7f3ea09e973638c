"""One value at a time: its declaration, its conversion from text, its range.

Knows nothing of which settings exist.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import os
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from guava_nb.errors import ConfigError

__all__ = ["Origin", "check", "near", "parse", "setting"]

#: Where a value came from, as a person would say it: "argument", "environment variable NUM_WORKERS".
Origin = str

TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
FALSE_WORDS = frozenset({"0", "false", "no", "off"})
NONE_WORDS = frozenset({"none", "null", "~"})


def setting(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
    env: tuple[str, ...] = (),
    instead: str | None = None,
) -> Any:
    """Declare a field of the configuration.

    Args:
        default: used when no source names the field.
        low: smallest allowed value.
        high: largest allowed value.
        above: the value must be greater than this.
        below: the value must be less than this.
        choices: allowed texts.
        env: further environment variables that set it, besides GUAVA_<FIELD>; the first that is set wins.
        instead: of one that nothing reads, and that is accepted for the sake of older programs: the field that takes its place,
            or "". None: it has an effect.
    """
    limits = {"low": low, "high": high, "above": above, "below": below, "choices": choices}
    return dataclasses.field(default=default, metadata={**limits, "env": env, "instead": instead})


def near(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ' Did you mean "x"?' when a known name looks like `name`, else an empty text.

    Args:
        name: what was written.
        known: what could have been meant.
        cutoff: likeness from 0 to 1 that counts as near.
    """
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return f' Did you mean "{found[0]}"?' if found else ""


def parse(name: str, text: str, kind: Any, origin: Origin) -> Any:
    """Turn the text of an environment variable or a file into the field's type.

    Raises:
        ConfigError: the text is no value of that type.
    """
    kinds, word = get_args(kind) or (kind,), text.strip()
    if type(None) in kinds and word.lower() in NONE_WORDS:
        return None
    if bool in kinds:
        if word.lower() in TRUE_WORDS | FALSE_WORDS:
            return word.lower() in TRUE_WORDS
    elif int in kinds or float in kinds:
        number = _number(word, int if int in kinds else float)
        if number is not None:
            return number
    else:
        return text
    raise _refusal(name, text, origin, f"it must be {_spoken(kinds)}")


def check(name: str, value: Any, kind: Any, limits: Mapping[str, Any], origin: Origin) -> Any:
    """Return the value in the field's own type.

    Raises:
        ConfigError: wrong type or out of range; names field, value, limit and origin.
    """
    kinds = get_args(kind) or (kind,)
    if value is None and type(None) in kinds:
        return None
    exact = _exact(value, kinds)
    if exact is None:
        raise _refusal(name, value, origin, f"it must be {_spoken(kinds)}, not {type(value).__name__}")
    broken = _broken_limit(exact, limits)
    if broken:
        raise _refusal(name, exact, origin, f"it must be {broken}")
    return exact


def _number(word: str, kind: type[int] | type[float]) -> int | float | None:
    try:
        return kind(word)
    except ValueError:
        return None


def _exact(value: Any, kinds: tuple[Any, ...]) -> Any:
    """The value as bool, int, float or str; None when it is nothing of the kind. Takes numpy's scalars too."""
    if bool in kinds:
        return bool(value) if isinstance(value, int) and value in (0, 1) else None
    if isinstance(value, bool):
        return None
    if str in kinds:
        return os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if isinstance(value, str):
        return None
    try:
        return operator.index(value) if int in kinds else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _broken_limit(value: Any, limits: Mapping[str, Any]) -> str:
    """Say the limit that the value breaks; an empty text when it breaks none."""
    if isinstance(value, float) and not math.isfinite(value):
        return "finite"
    if limits.get("choices") and value not in limits["choices"]:
        return "one of " + ", ".join(limits["choices"]) + "." + near(str(value), limits["choices"])
    low, high, above, below = (limits.get(key) for key in ("low", "high", "above", "below"))
    if low is not None and value < low:
        return f"at least {low}"
    if high is not None and value > high:
        return f"at most {high}"
    if above is not None and value <= above:
        return f"greater than {above}"
    if below is not None and value >= below:
        return f"less than {below}"
    return ""


def _spoken(kinds: tuple[Any, ...]) -> str:
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "none"}
    return " or ".join(words[kind] for kind in kinds)


def _refusal(name: str, value: Any, origin: Origin, rule: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r} (from {origin}); {rule}")
