"""The installed version, read from the package's metadata so that it is written down once."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["installed_version"]


def installed_version() -> str:
    """Return the version of guava-nb; "0+unknown" for a source tree that was never installed."""
    try:
        return version("guava-nb")
    except PackageNotFoundError:
        return "0+unknown"
