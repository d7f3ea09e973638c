"""Where settings come from besides arguments: the environment, `.env`, YAML.

Knows the names that older programs used for the same settings. Returns raw values with their origin; texts are turned
into the field's type only if they win, so a wrong value that is overridden does no harm.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from guava_nb.config.values import Origin, near
from guava_nb.errors import ConfigError

__all__ = ["OF_THE_FOLDER", "Layer", "Table", "Text", "from_env_file", "from_environ", "from_yaml"]

#: Field name to (raw value, origin).
Layer = dict[str, tuple[Any, Origin]]
#: Field name to (type, further environment variables).
Table = Mapping[str, tuple[Any, tuple[str, ...]]]

PREFIX = "GUAVA_"
#: Variables of ours that are no settings: a secret, and switches of the notebook and the tests.
OTHER_VARIABLES = frozenset({"GUAVA_JOIN_CODE", "GUAVA_UI", "GUAVA_TEST"})

_ENV_FILE, _YAML_FILE = ".env", "config.yaml"
#: Ends of the origins of what was found in the current folder, where nothing named a file.
OF_THE_FOLDER = tuple(f" in file {name}" for name in (_ENV_FILE, _YAML_FILE))

#: Names inside a section of the YAML file that mean one of our fields. In the section "training" of such a file
#: `num_workers` are processes of the data loader, not members of the cluster.
SECTIONS: Mapping[str, Mapping[str, str]] = {
    "network": {"cpu_host": "master_ip", "gpu_host": "gpu_host", "port": "master_port"},
    "training": {"num_workers": "loader_workers", "epochs": "num_epochs"},
}


class Text(str):
    """A value that was read as text and still has to become its field's type."""

    __slots__ = ()


def from_environ(environ: Mapping[str, str] | None, table: Table) -> Layer:
    """Read the fields that the environment names; an empty variable counts as not set.

    Raises:
        ConfigError: a GUAVA_ variable that looks like a misspelt field.
    """
    return _from_variables(os.environ if environ is None else environ, table, "environment variable {}")


def from_env_file(path: str | Path | None, table: Table) -> Layer:
    """Read a file of KEY=value lines, with the names of the environment.

    Raises:
        ConfigError: a named file that is not there, or a misspelt GUAVA_ variable.
    """
    found = _find(path, _ENV_FILE)
    if found is None:
        return {}
    from dotenv import dotenv_values

    # Without interpolation: a password with a $ in it must not change.
    values = dotenv_values(found, interpolate=False, encoding="utf-8")
    return _from_variables({k: v for k, v in values.items() if v}, table, f"{{}} in file {found}")


def from_yaml(path: str | Path | None, table: Table) -> Layer:
    """Read a YAML mapping of fields, flat or in the sections "network" and "training".

    Raises:
        ConfigError: a named file that is not there, bad YAML, an unknown key or section, a setting given twice.
    """
    found = _find(path, _YAML_FILE)
    if found is None:
        return {}
    layer: Layer = {}
    for key, name, value in _flatten(_read_yaml(found), found):
        if name not in table:
            known = [*table, *SECTIONS, *(key for names in SECTIONS.values() for key in names)]
            raise ConfigError(f"{key!r} is no setting (from file {found}).{near(key.split('.')[-1], known)}")
        if name in layer:
            raise ConfigError(f"{name} is set twice in file {found} (again as {key!r}); leave one of them out")
        layer[name] = (Text(value) if isinstance(value, str) else value, f"{key} in file {found}")
    return layer


def _from_variables(variables: Mapping[str, str], table: Table, origin: str) -> Layer:
    _refuse_misspelt(variables, table, origin)
    layer: Layer = {}
    for name, (_, older_names) in table.items():
        for variable in (PREFIX + name.upper(), *older_names):
            if variables.get(variable, "").strip():
                layer[name] = (Text(variables[variable]), origin.format(variable))
                break
    return layer


def _refuse_misspelt(variables: Mapping[str, str], table: Table, origin: str) -> None:
    """Only near names are refused: other programs may have GUAVA_ variables of their own."""
    known = {PREFIX + name.upper() for name in table}
    for variable in sorted(set(variables) - known - OTHER_VARIABLES):
        if variable.startswith(PREFIX) and (hint := near(variable, known, cutoff=0.85)):
            raise ConfigError(f"no setting belongs to {origin.format(variable)}.{hint}")


def _find(path: str | Path | None, default: str) -> Path | None:
    if path is None:
        return Path(default) if Path(default).is_file() else None
    if not Path(path).is_file():
        raise ConfigError(f"there is no file {path} (looked in {Path.cwd()})")
    return Path(path)


def _read_yaml(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"cannot read file {path}: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"file {path} must hold names with values (batch_size: 64), not {type(content).__name__}")
    return content


def _flatten(content: Mapping[str, Any], path: Path) -> Iterable[tuple[str, str, Any]]:
    """Yield (key as written, field name, value)."""
    for key, value in content.items():
        if key not in SECTIONS:
            yield key, key, value
            continue
        if not isinstance(value, dict):
            raise ConfigError(f"section {key!r} in file {path} must hold names with values, not {value!r}")
        for inner, inner_value in value.items():
            yield f"{key}.{inner}", SECTIONS[key].get(str(inner), str(inner)), inner_value
