"""Continues prompts with a language model on one device: the model's own `generate`, or a loop of greedy or sampled tokens.

Each prompt is continued by itself, and its random numbers come from its own seed: what comes of it does not depend on which
prompts are beside it, or where. Knows models that give logits [B, T, V]; knows no tokenizer and no workers.

Shapes: B prompts (1 here), T tokens, V the vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from guava_nb.errors import ConfigError
from guava_nb.replica.rng import seeded

__all__ = ["NO_TOKEN", "Sampling", "continued", "each_token_to", "generate_rows"]

#: Fills rows of tokens that ended early.
NO_TOKEN = -1

#: Gets the number of a prompt and each token that follows it, as soon as it is made; may raise, and that ends the generating.
OnToken = Callable[[int, int], None]
_on_token: ContextVar[OnToken] = ContextVar("on_token", default=lambda number, token: None)


@contextmanager
def each_token_to(on_token: OnToken) -> Iterator[None]:
    """Have the tokens that `generate_rows` makes inside told as they are made, those of beams apart: they may be taken back."""
    before = _on_token.set(on_token)
    try:
        yield
    finally:
        _on_token.reset(before)


@dataclass(frozen=True)
class Sampling:
    """How prompts are continued.

    Attributes:
        new: tokens to make at most.
        temperature: 0 takes the most probable token; more samples.
        top_k: only among so many of the most probable ones.
        seed: of a prompt's random numbers, as after `torch.manual_seed`; its number is added.
        end: the token after which a prompt is done.
        context: the model sees so many of the last tokens at most; only where it has no `generate` of its own.
        more: further arguments of transformers' `generate`.

    Raises:
        ConfigError: a number is out of its range.
    """

    new: int
    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0
    end: int | None = None
    context: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name, value in (("max_new_tokens", self.new), ("top_k", self.top_k), ("context", self.context)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} is {value!r}; give a whole number, at least 1")
        if not isinstance(self.temperature, int | float) or not 0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature is {self.temperature!r}; give 0 for the most probable token, or more to sample"
            )
        if self.top_k is not None and not self.temperature:
            raise ConfigError(
                "top_k chooses among the most probable tokens when sampling: give a temperature above 0, too"
            )


def generate_rows(model: nn.Module, batch: Mapping[str, Tensor], *, sampling: Mapping[str, Any]) -> Tensor:
    """Continue the prompts of a batch.

    Args:
        batch: "tokens" [N, T], of which the first "length" [N] of each row count, and "number" [N] of each prompt.
        sampling: fields of `Sampling`.

    Returns:
        [N, new] tokens, `NO_TOKEN` where a row ended before.

    Raises:
        ConfigError: as for `continued`.
    """
    how = Sampling(**sampling)
    rows = torch.full((len(batch["tokens"]), how.new), NO_TOKEN, dtype=torch.int64)
    for row, (tokens, length, number) in enumerate(
        zip(batch["tokens"], batch["length"].tolist(), batch["number"].tolist(), strict=True)
    ):
        made = continued(model, tokens[:length], how, number)
        rows[row, : len(made)] = made
    return rows


def continued(model: nn.Module, prompt: Tensor, how: Sampling, number: int = 0) -> Tensor:
    """Return at most `how.new` tokens that follow a prompt, [T] on the CPU.

    Args:
        prompt: tokens [T] on the model's device, at least one.
        number: of the prompt.

    Raises:
        ConfigError: the model gives no logits [B, T, V], or takes none of `how.more`.
    """
    tell = partial(_on_token.get(), number)
    with torch.no_grad():
        if hasattr(model, "generation_config"):  # transformers': others' generate have arguments of their own
            with seeded(how.seed + number, prompt.device):
                found = _by_model(model, prompt, how, tell)
        elif how.more:
            raise ConfigError(
                f"{', '.join(how.more)}: only a model of transformers takes further arguments, and {type(model).__name__} is "
                "none"
            )
        else:
            found = _by_loop(model, prompt, how, _Choice(how.temperature, how.top_k, how.seed + number), tell)
    return found.to("cpu", torch.int64)


class _Streamer:
    """What transformers' `generate` tells its tokens: at first what it begins with."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell, self._has_begun = tell, False

    def put(self, tokens: Tensor) -> None:
        """Take the next tokens, `[]` or `[1]`; the first call has the prompt, `[1, T]`."""
        for token in tokens.flatten().tolist() if self._has_begun else ():
            self._tell(token)
        self._has_begun = True

    def end(self) -> None:
        """Nothing is held back."""


def _by_model(model: Any, prompt: Tensor, how: Sampling, tell: Callable[[int], None]) -> Tensor:
    """Return the tokens, `[new or fewer]`, with which the model's own `generate` continues a prompt `[T]`.

    Raises:
        ConfigError: it gave several sequences.
    """
    settings: dict[str, Any] = {"max_new_tokens": how.new, "do_sample": how.temperature > 0, **how.more}
    if how.temperature > 0:
        settings.setdefault("temperature", how.temperature)
        settings.setdefault("top_k", how.top_k or 0)  # transformers' own default is 50
    if how.end is not None:
        settings.setdefault("eos_token_id", how.end)
        settings.setdefault("pad_token_id", how.end)
    beams = settings.get("num_beams", getattr(model.generation_config, "num_beams", None))
    if beams in (None, 1) and "streamer" in inspect.signature(model.generate).parameters:
        settings["streamer"] = _Streamer(tell)
    made = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **settings)
    made = getattr(made, "sequences", made)
    if made.ndim != 2 or len(made) != 1:
        raise ConfigError("generate gave several sequences for one prompt: leave num_return_sequences out")
    # A model with an encoder begins anew with a token of its own.
    tokens: Tensor = made[0, 1:] if getattr(model.config, "is_encoder_decoder", False) else made[0, len(prompt) :]
    return tokens


def _by_loop(model: nn.Module, prompt: Tensor, how: Sampling, choice: _Choice, tell: Callable[[int], None]) -> Tensor:
    """Return the tokens, `[new or fewer]`, that a loop of one token after the other puts behind a prompt `[T]`."""
    tokens = prompt[None]
    for _ in range(how.new):
        logits = _logits(model, tokens if how.context is None else tokens[:, -how.context :])
        chosen = choice.of(logits[0, -1])
        tokens = torch.cat([tokens, tokens.new_full((1, 1), chosen)], dim=1)
        tell(chosen)
        if chosen == how.end:
            break
    return tokens[0, len(prompt) :]


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return what a model says of tokens `[B, T]`, `[B, T, V]`: its output, the output's `logits`, or the first of several.

    Raises:
        ConfigError: that is no such tensor.
    """
    outputs = model(tokens)
    logits = getattr(outputs, "logits", outputs)
    logits = logits[0] if isinstance(logits, tuple) else logits
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != tokens.shape:
        shape = f" {tuple(logits.shape)}" if isinstance(logits, Tensor) else f" {type(logits).__name__}"
        raise ConfigError(
            f"a model that generates gives logits [B, T, V] for tokens [B, T]; {type(model).__name__} gave{shape} for "
            f"{tuple(tokens.shape)}"
        )
    return logits


class _Choice:
    """The next token of logits [V]; drawn on the CPU in float64, so the same seed draws alike for every kind of device."""

    def __init__(self, temperature: float, top_k: int | None, seed: int) -> None:
        self._temperature, self._top_k = temperature, top_k
        self._random = torch.Generator().manual_seed(seed)

    def of(self, logits: Tensor) -> int:
        """Choose one of logits `[V]`."""
        if self._temperature == 0:
            return int(logits.argmax())
        scores = logits.to("cpu", torch.float64) / self._temperature
        best = scores.topk(min(self._top_k or len(scores), len(scores))).indices
        return int(best[torch.multinomial(scores[best].softmax(0), 1, generator=self._random)])
