"""How every magic reads its line: one table per magic, one parser for all.

A mistake is a `UsageError` (IPython shows exactly that class as one line, its subclasses with a traceback) and names
the nearest right word.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from IPython.core.error import UsageError

from guava_nb.config.units import parse_bytes, parse_seconds
from guava_nb.errors import ConfigError
from guava_nb.notebook.line_words import expand, near, split_line, take_code
from guava_nb.render import redact
from guava_nb.spec.training_options import MEASURED

__all__ = [
    "Command",
    "Offers",
    "Option",
    "byte_size",
    "choice",
    "duration",
    "flag",
    "integer",
    "json_object",
    "number",
    "option",
    "shares",
    "word",
    "zero_stage",
]


#: Kinds of words that tab offers, each with what gives those that begin in some way.
Offers = Mapping[str, Callable[[str], list[str]]]
#: What is looked for among the options of a line and is no option of any, with where it is.
_NO_OPTION = {
    **dict.fromkeys(("--batch-size", "--shuffle", "--num-workers"), "an option of the DataLoader"),
    "--mode": "an option of no magic: %guava_mode pipeline chooses one for the runs that follow",
    "--amp": "an option of no magic: --precision bf16 does it",
}
#: The magics that have an option, by its name, so that one on a wrong line is told where it belongs.
_HOMES: dict[str, list[str]] = {}
_HOMES_NAMED = 3  # more would hide the sentence


@dataclass(frozen=True)
class Option:
    """One argument of a magic.

    Attributes:
        flags: "--port", or a bare name for a positional argument.
        settings: passed on to argparse.
        complete: what tab offers as its value: words, and kinds of words that are looked up then, such as "<shared>".
    """

    flags: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    complete: tuple[str, ...] = ()

    @property
    def takes_value(self) -> bool:
        """Whether the word after the option belongs to it."""
        return self.settings.get("action") != "store_true"


@dataclass(frozen=True)
class Command:
    """A magic's name, what it does, its arguments, and groups of which exactly one must be given.

    `code_to` names the argument that takes a pasted join code, if there is one; `rest_to` the one that takes the first word
    that is no option, and all that follows: a program and its own command line.
    """

    name: str
    summary: str
    options: tuple[Option, ...] = ()
    example: str = ""
    one_of: tuple[str, ...] = ()
    sign: str = "%"
    code_to: str = ""
    rest_to: str = ""

    def __post_init__(self) -> None:
        for entry in self.options:
            for name in entry.flags:
                _HOMES.setdefault(name, []).append(f"{self.sign}{self.name}")

    def parse(self, line: str, namespace: Mapping[str, Any]) -> argparse.Namespace | None:
        """Read a line; None means that help was asked for.

        Raises:
            UsageError: anything on the line is wrong, in one sentence.
        """
        line, code = take_code(line, self.flags()) if self.code_to else (line, "")
        words, rest = self._apart(split_line(line))
        if "-h" in words or "--help" in words:
            return None
        self._check_flags(words)
        parser = self._parser()
        args, extra = parser.parse_known_args([expand(word, namespace) for word in words])
        if extra:
            parser.error(f"{extra[0]!r} is one word too many (put quotes round a value with blanks)")
        self._check_one_of(parser, args)
        if code:
            setattr(args, self.code_to, [code])
        if self.rest_to:
            setattr(args, self.rest_to, [expand(word, namespace) for word in rest])
        return args

    def _apart(self, words: list[str]) -> tuple[list[str], list[str]]:
        """A line's own options, and what is another program's."""
        valued = [flag for entry in self.options if entry.takes_value for flag in entry.flags]
        at = 0
        while self.rest_to and at < len(words) and words[at].startswith("-") and words[at] != "--":
            at += 2 if words[at] in valued else 1
        if not self.rest_to:
            return words, []
        return words[:at], words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:]

    def help(self, width: int = 100) -> str:
        """Usage, options and an example as text, in lines of so many characters."""
        return self._parser(width).format_help().rstrip()

    def flags(self) -> tuple[str, ...]:
        """Every option's names."""
        named = [flag for entry in self.options for flag in entry.flags if flag.startswith("-")]
        return (*named, "-h", "--help")

    def completions(self, before: Sequence[str], symbol: str, offers: Offers) -> list[str]:
        """What may stand at the cursor.

        Args:
            before: the words left of it, without the magic's name.
            symbol: the word at the cursor, as far as it goes.
            offers: gives the words of a kind that begin so.
        """
        waiting = next((entry for entry in self.options if before and before[-1] in entry.flags), None)
        if waiting is not None and waiting.takes_value:
            return _values(waiting, symbol, offers)
        found = [name for name in self.flags() if name.startswith(symbol) and name not in before]
        positional = next((entry for entry in self.options if not entry.flags[0].startswith("-")), None)
        if positional is None or symbol.startswith("-"):
            return found
        return _values(positional, symbol, offers) + ([] if symbol else found)

    def _check_flags(self, words: Sequence[str]) -> None:
        """Before argparse: it would complain of a missing option first and never come to the typo."""
        known = self.flags()
        for text in words:
            name = text.split("=", 1)[0]
            is_option = name.startswith("--") or (name.startswith("-") and name[1:2].isalpha())
            if name not in known and (home := _home(name)):
                raise UsageError(f"{self.sign}{self.name}: {name} is {home}")
            if re.match(r"-\.?\d", text) and not _is_number(text):  # argparse would say that nothing was given
                raise UsageError(f"{self.sign}{self.name}: {text} begins with a minus, and can be no value here")
            if is_option and name not in known:
                raise UsageError(redact(f"{self.sign}{self.name} has no option {name}{near(name, known)}"))

    def _check_one_of(self, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        given = [name for name in self.one_of if getattr(args, name) is not None]
        if self.one_of and len(given) != 1:
            names = " or ".join(f"--{name}" for name in self.one_of)
            parser.error(f"give {'one of ' if not given else 'only one of '}{names}")

    def _parser(self, width: int = 100) -> argparse.ArgumentParser:
        parser = _Parser(
            prog=f"{self.sign}{self.name}",
            description=self.summary,
            epilog=f"example: {self.example}" if self.example else None,
            formatter_class=partial(_Formatter, width=width),
            add_help=False,
            allow_abbrev=False,
        )
        for entry in self.options:
            parser.add_argument(*entry.flags, **{**entry.settings, "help": self._told(entry)})
        parser.add_argument("-h", "--help", action="store_true", help="show this help")
        return parser

    def _told(self, entry: Option) -> str:
        """What the help says of an option: what counts where it is left out, too."""
        text, name = str(entry.settings.get("help", "")), entry.flags[0]
        is_needed = entry.settings.get("required") or name.lstrip("-") in self.one_of or not name.startswith("-")
        return text if is_needed or not entry.takes_value or "default" in text else f"{text} (default: none)"


class _Parser(argparse.ArgumentParser):
    """Ends nothing and prints nothing: a mistake is one line."""

    def error(self, message: str) -> NoReturn:
        message = message.replace("expected one argument", "a value is missing after it")
        raise UsageError(redact(f"{self.prog}: {message} ({self.prog} -h explains)"))


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str, width: int, **settings: Any) -> None:
        settings["width"] = width  # a cell's width has nothing to do with the terminal the kernel came from
        super().__init__(prog, **settings)


class _Once(argparse.Action):
    """Stores one value and refuses a second one: which of the two was meant is the user's to say."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given = vars(namespace).setdefault("_given", set())
        if self.dest in given:
            parser.error(f"{option_string} is given twice; keep one")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def _home(name: str) -> str:
    """Where an option belongs, for a line that does not have it; "" where no magic has it."""
    if name in _NO_OPTION:
        return _NO_OPTION[name]
    homes = _HOMES.get(name, []) if name.startswith("--") else []
    others = ", ..." if len(homes) > _HOMES_NAMED else ""
    return f"an option of {', '.join(homes[:_HOMES_NAMED])}{others}" if homes else ""


def option(*flags: str, complete: tuple[str, ...] = (), **settings: Any) -> Option:
    """An option with one value."""
    return Option(flags, {"action": _Once, **settings}, complete)


def flag(*flags: str, **settings: Any) -> Option:
    """An option without a value."""
    return Option(flags, {"action": "store_true", **settings})


def word(name: str, *, complete: tuple[str, ...] = (), **settings: Any) -> Option:
    """A positional argument."""
    return Option((name,), settings, complete)


def choice(*names: str, also: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """A type that takes one of `names` and proposes the nearest; `also`: what other words mean, in lower case."""

    def parse(text: str) -> str:
        if text not in names:
            known = (also or {}).get(text.lower())
            hint = f"; did you mean {known}?" if known else near(text.lower(), names)
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}{hint}")
        return text

    return parse


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """A type for whole numbers from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low or (high is not None and value > high):
            bounds = f"{low} or more" if high is None else f"between {low} and {high}"
            raise argparse.ArgumentTypeError(f"{value} is not {bounds}")
        return value

    return parse


def number(text: str) -> float:
    """A type for finite numbers."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def byte_size(text: str) -> int:
    """A type for sizes with their unit, such as 900MB."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def period(text: str) -> int | str:
    """A type for steps, such as 500, or times with their unit, such as 10min."""
    if text.isdecimal():
        return int(text)
    try:
        parse_seconds(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{error}; or steps, like 500") from None
    return text


def duration(text: str) -> str:
    """A type for times with their unit, such as 10min."""
    try:
        parse_seconds(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def json_object(example: str) -> Callable[[str], dict[str, Any]]:
    """A type for names with values: a JSON object, or a Python dict of plain values; `example` is shown where it is not."""

    def parse(text: str) -> dict[str, Any]:
        value: Any = None
        try:
            value = json.loads(text)
        except ValueError:
            try:
                value = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object such as {example}") from None
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise argparse.ArgumentTypeError(f"{text!r} does not map names to values, as {example} does")
        return value

    return parse


def zero_stage(text: str) -> int:
    """A type for how much ZeRO shares out; which of them a mode takes, `guava_nb.config.mode_settings` says."""
    if text not in ("0", "1", "2", "3"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no ZeRO stage: zero mode takes 1, 2 or 3, hybrid mode 0, 1, 2 or 3 (with stages 0 or 1)"
        )
    return int(text)


def shares(text: str) -> tuple[float, ...] | str:
    """A type for weights per worker: "2,1" gives the first worker two thirds; or "measured"."""
    if text == MEASURED:
        return text
    values = tuple(number(part) for part in text.strip("[]()").split(",") if part.strip())
    if not values or min(values) < 0 or sum(values) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of weights such as 2,1")
    return values


def _values(entry: Option, symbol: str, offers: Offers) -> list[str]:
    found: list[str] = []
    for words in entry.complete:
        found += offers[words](symbol) if words in offers else [words]
    return list(dict.fromkeys(name for name in found if name.startswith(symbol)))
