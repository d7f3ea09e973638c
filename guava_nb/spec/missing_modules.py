"""Which module an import did not find; and what to do about one that a worker cannot import, said by the machine that has it.

A name that Python imports is not the name of a package in an index, and a module of the user's own has none there: what an
index holds under that name may be a stranger's. So a package is named only where this machine's own records tell it.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import pkgutil
import sys
from importlib import metadata
from pathlib import Path

__all__ = ["absent_part", "missing_advice", "missing_package"]


def missing_package(error: BaseException | None) -> str:
    """Return the top-level name of a package that is not installed on this machine, whose import raised this error, else ""."""
    if not isinstance(error, ModuleNotFoundError) or absent_part(error):
        return ""
    return (error.name or "").partition(".")[0]


def absent_part(error: BaseException | None) -> str:
    """Return a sentence where an import raised this error for a part that an installed package does not have, else "".

    Parts of a package without a file of its own (a namespace) come in packages of their own, so there one is missing.
    """
    whole, _, part = (error.name or "").rpartition(".") if isinstance(error, ModuleNotFoundError) else ("", "", "")
    package = sys.modules.get(whole)
    if package is None or (getattr(package, "__file__", None) is None and hasattr(package, "__path__")):
        return ""
    names = [one.name for one in pkgutil.iter_modules(getattr(package, "__path__", ()))]
    found = difflib.get_close_matches(part, [name for name in names if not name.startswith("_")], n=1)
    hint = f"did you mean '{whole}.{found[0]}'?" if found else "another version of it may have one"
    return f"{whole!r} is installed on this machine and has no module {part!r} in it; {hint}"


def missing_advice(module: str) -> str:
    """Return what to do so that a worker can import a module: an installed package, a file of the user's, or neither.

    Args:
        module: as it is imported; parts after the first point do not count.
    """
    top = module.partition(".")[0]
    names = sorted(set(metadata.packages_distributions().get(top, ())))
    indexed = [name for name in names if not _is_local(name)]
    if indexed:
        there, here = f"%pip install {indexed[0]}", f"%guava_pip {indexed[0]}"
        return f"run  {there}  there, as it is installed here, or  {here}  here; then start again"
    path = _path_of(top)
    if names or path:
        where = f"{path} here" if path else f"the package {names[0]!r} that was installed here from a folder"
        return (
            f"{top!r} is {where}, and in no package index that is known: "
            + (
                f"%guava_files {path} sends it to the workers"
                if path
                else "copy it to the folder where that worker runs"
            )
            + "; or put its code in a %%guava_share cell; then start again"
        )
    return (
        f"nothing here tells which package has {top!r}: install on that machine the one that you know to have it, or put its "
        "code in a %%guava_share cell, then start again"
    )


def _is_local(distribution: str) -> bool:
    """Whether a distribution was installed from a folder or a file of this machine, as pip noted it (PEP 610)."""
    try:
        record = metadata.distribution(distribution).read_text("direct_url.json")
        return str(json.loads(record or "{}").get("url", "")).startswith("file:")
    except (metadata.PackageNotFoundError, ValueError):
        return True


def _path_of(module: str) -> str:
    """Return where the text of a module lies here; "" where there is none."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return ""
    if found is None:
        return ""
    places = [found.origin] if found.has_location and found.origin else list(found.submodule_search_locations or ())
    path = Path(places[0]) if places else None
    if path is None:
        return ""
    return str(path.parent if path.name == "__init__.py" else path)
