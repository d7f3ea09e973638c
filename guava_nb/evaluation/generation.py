"""Prompts shared out over workers, each continued where it is, and what comes of them, in their order.

Knows prompts as tokens and passes over data; knows no text and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from guava_nb.cluster.cluster import Cluster
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.errors import ConfigError
from guava_nb.evaluation.between_runs import ask
from guava_nb.evaluation.passes import Progress
from guava_nb.evaluation.predictions import Prediction
from guava_nb.evaluation.result_files import MemoryResults
from guava_nb.protocol.messages import Factory, Generated, Wanted
from guava_nb.replica.model.generate import NO_TOKEN, Sampling
from guava_nb.sync.replica_set import ReplicaSet

__all__ = ["generate", "prompts_of"]

_STEP = "guava_nb.replica.model.generate:generate_rows"
#: Gets the number of a prompt and the tokens that follow it.
OnDone = Callable[[int, list[int]], None]


def prompts_of(prompts: Any, encode: Callable[[str], Any] | None) -> list[torch.Tensor]:
    """Return prompts as tokens [T].

    Args:
        prompts: text, or a list of texts, of lists of tokens, or of tensors [T]; or one tensor [B, T].
        encode: makes tokens of a text; None: there is no tokenizer.

    Raises:
        ConfigError: there is none, or one of them is empty or of another kind.
    """
    if not isinstance(prompts, Iterable):
        raise ConfigError(
            f"prompts are of type {type(prompts).__name__}: give text, or a list of texts or of lists of tokens"
        )
    found: list[torch.Tensor] = []
    for prompt in [prompts] if isinstance(prompts, str) else prompts:
        if isinstance(prompt, str) and encode is None:
            raise ConfigError("prompts of text need tokenizer= (--tokenizer); without one give lists of tokens")
        try:
            tokens = torch.as_tensor(encode(prompt) if isinstance(prompt, str) and encode is not None else prompt)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"prompt {len(found)} is a {type(prompt).__name__} that makes no row of tokens ({error}): give text, or lists of "
                "tokens; not a DataLoader, whose batches have more in them"
            ) from None
        if tokens.ndim != 1 or not len(tokens) or tokens.is_floating_point():
            raise ConfigError(
                f"prompt {len(found)} is no row of tokens, but of shape {tuple(tokens.shape)} and type {tokens.dtype}; an empty "
                "one begins with the model's token for a beginning"
            )
        found.append(tokens.to("cpu", torch.int64))
    if not found:
        raise ConfigError("there is no prompt: give text, or a list of prompts")
    return found


def generate(
    cluster: Cluster, replica_set: ReplicaSet, prompts: Sequence[torch.Tensor], sampling: Sampling, *,
    on_done: OnDone, on_tokens: OnDone, grace_s: float, progress: Progress | None,
) -> list[list[int]]:  # fmt: skip
    """Continue prompts with the last committed state.

    Args:
        prompts: tokens [T] of each.
        on_done: called in the order of the prompts, as they come.
        on_tokens: called a few times a second with the number of a prompt in work and all tokens of it so far.
        grace_s, progress: as for `ask`.

    Raises:
        ConfigError: workers hold parts of the model only; or the model gives no logits.
    """
    _check_whole(replica_set)
    # Where ranks of a group share each batch, it has a prompt for each; else each worker takes one after the other.
    at_once = 1 if replica_set.spec.parallel is None else max(1, len(cluster.roster.ready()))
    wanted = Wanted(raw=True, step=Factory(_STEP, {"sampling": asdict(sampling)}))
    results = _AsTheyCome(len(prompts), on_done)
    so_far = _SoFar(len(prompts), sampling.new, on_tokens)
    feed = LoaderFeed(list(_batches(prompts, at_once)))
    ask(
        cluster,
        replica_set,
        feed,
        Prediction(wanted, results, len(prompts), heard=so_far.heard),
        grace_s=grace_s,
        progress=progress,
    )
    return results.rows_of_tokens


def _check_whole(replica_set: ReplicaSet) -> None:
    shape, preprocess = replica_set.spec.parallel, replica_set.spec.preprocess
    if shape is not None and (shape.pp > 1 or shape.tp > 1 or shape.zero_stage > 1):
        raise ConfigError(
            f"in {shape.mode} mode workers hold parts of the model, and generating needs all of it on each: save it "
            "(%guava_save model.pt), choose %guava_mode data, load it (%guava_resume model.pt), and ask again"
        )
    if preprocess is not None:
        raise ConfigError(
            f"the run's preprocess ({preprocess.name}) is made for its batches, and prompts are others: save the model "
            "(%guava_save model.pt), load it (%guava_resume model.pt) and ask again"
        )


def _batches(prompts: Sequence[torch.Tensor], at_once: int) -> Iterator[dict[str, torch.Tensor]]:
    for start in range(0, len(prompts), at_once):
        part = prompts[start : start + at_once]
        yield {
            "tokens": torch.nn.utils.rnn.pad_sequence(list(part), batch_first=True),
            "length": torch.tensor([len(one) for one in part]),
            "number": torch.arange(start, start + len(part)),
        }


class _SoFar:
    """Tokens of the prompts in work. A prompt that another worker begins anew has the same ones, and goes on where they end."""

    def __init__(self, prompts: int, most: int, on_tokens: OnDone) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(prompts)]
        self._most, self._on_tokens = most, on_tokens

    def heard(self, message: Generated) -> None:
        """Take what a worker told; what is no part of an answer is left out."""
        if not 0 <= message.number < len(self._tokens):
            return
        known = self._tokens[message.number]
        new = message.tokens[len(known) - message.begin :] if 0 <= message.begin <= len(known) else ()
        if new and len(known) + len(new) <= self._most:
            known.extend(new)
            self._on_tokens(message.number, list(known))


class _AsTheyCome(MemoryResults):
    """Rows of tokens, told as soon as they are here."""

    def __init__(self, expected_rows: int, on_done: OnDone) -> None:
        super().__init__(expected_rows)
        self._on_done = on_done
        self.rows_of_tokens: list[list[int]] = []

    def append(self, arrays: Any, batches: int, last_id: int | None) -> None:
        """Take the rows of a batch."""
        found = next(array for name, array in arrays.items() if name != "sample_ids")
        super().append(arrays, batches, last_id)
        for row in np.asarray(found).tolist():
            tokens = [token for token in row if token != NO_TOKEN]
            self.rows_of_tokens.append(tokens)
            self._on_done(len(self.rows_of_tokens) - 1, tokens)
