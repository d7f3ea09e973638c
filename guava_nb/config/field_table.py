"""The fields of a configuration as a table: names, types, limits, defaults; all of it read from the class."""

from __future__ import annotations

import typing
from dataclasses import fields
from typing import Any

from guava_nb.config.sources import Table, Text
from guava_nb.config.units import parse_bytes
from guava_nb.config.values import Origin, check, near, parse
from guava_nb.errors import ConfigError

__all__ = ["FieldTable"]


class FieldTable:
    """What a dataclass of `setting` fields says of each.

    Args:
        owner: the dataclass.
        sizes: fields whose text is a size with its unit, such as 900MB.

    Attributes:
        names: of all settings, in order.
    """

    def __init__(self, owner: Any, sizes: tuple[str, ...] = ()) -> None:
        """Read the class once."""
        self._sizes = sizes
        hints = typing.get_type_hints(owner)
        self._fields = {one.name: one for one in fields(owner) if one.init}
        self._kinds = {name: hints[name] for name in self._fields}
        self.names = tuple(self._fields)

    def default(self, name: str) -> Any:
        """Return the value that a field has where no source names it."""
        return self._fields[name].default

    def without_effect(self) -> dict[str, str]:
        """Return the names that are accepted and read by nothing, each with the field that takes its place, or ""."""
        every = {name: one.metadata["instead"] for name, one in self._fields.items()}
        return {name: instead for name, instead in every.items() if instead is not None}

    def for_sources(self) -> Table:
        """Return types and further environment variables by name."""
        return {name: (kind, self._fields[name].metadata["env"]) for name, kind in self._kinds.items()}

    def known(self, name: str, origin: Origin) -> str:
        """Return a name.

        Raises:
            ConfigError: it is no field; the near one is named.
        """
        if name not in self._fields:
            raise ConfigError(f"{name!r} is no setting (from {origin}).{near(name, self.names)}")
        return name

    def checked(self, name: str, value: Any, origin: Origin) -> Any:
        """Return a value in its field's own type.

        Raises:
            ConfigError: it is of another type, or out of range.
        """
        if name in self._sizes and isinstance(value, str) and value.strip() != "0":
            try:
                value = parse_bytes(value)
            except ConfigError as error:
                raise ConfigError(f"{name} (from {origin}): {error}") from None
        if isinstance(value, Text):
            value = parse(name, value, self._kinds[name], origin)
        return check(name, value, self._kinds[name], self._fields[name].metadata, origin)
