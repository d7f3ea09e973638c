"""How weights of the Hugging Face hub are named: "hf:NAME[@REVISION]". Knows text alone."""

from __future__ import annotations

from guava_nb.errors import ConfigError

__all__ = ["ON_HUB", "is_on_hub", "split_name"]

ON_HUB = "hf:"


def is_on_hub(weights: object) -> bool:
    """Whether these weights are named by a repository of the hub, and not by a file."""
    return str(weights).startswith(ON_HUB)


def split_name(weights: str) -> tuple[str, str | None]:
    """Return the repository and the revision, None where none is named.

    Raises:
        ConfigError: no repository is named.
    """
    name, _, revision = weights.removeprefix(ON_HUB).replace("\\", "/").partition("@")
    if not name or name.startswith(("/", ".")):
        raise ConfigError(f"{weights!r} names no repository: --weights hf:NAME, as in hf:distilbert/distilgpt2@main")
    return name, revision or None
