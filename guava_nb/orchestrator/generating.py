"""What an orchestrator does between runs beside passes over data: text from a language model, room for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from guava_nb.cluster.cluster import Cluster
from guava_nb.evaluation.generation import generate, prompts_of
from guava_nb.evaluation.passes import Progress
from guava_nb.replica.model.generate import Sampling
from guava_nb.training.progress_bar import reporting

if TYPE_CHECKING:
    from guava_nb.config import DistributedConfig
    from guava_nb.orchestrator.replica_sets import ReplicaSets
    from guava_nb.sync.replica_set import ReplicaSet

__all__ = ["Generating"]


class Generating:
    """A part of `Orchestrator`."""

    config: DistributedConfig
    _replica_sets: ReplicaSets
    _open_cluster: Callable[[], Cluster]
    _for_question: Callable[[Any, Any], ReplicaSet]

    def generate(
        self,
        prompts: str | Sequence[Any],
        max_new_tokens: int = 50,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int = 0,
        tokenizer: Any = None,
        on_done: Callable[[int, Any], None] = lambda number, found: None,
        progress: bool | Progress = True,
        **more: Any,
    ) -> list[str] | list[list[int]]:
        """Continue prompts with the trained language model; each worker continues some of them.

        A model of transformers does it by its own `generate`; any other that gives logits [B, T, V] for tokens [B, T] in a loop.
        Prompt i is continued by itself and sampled as after `torch.manual_seed(seed + i)`, so what comes of it does not depend
        on the number of workers.

        Args:
            seed: of the random numbers, see above.
            prompts: a text, a list of texts, of lists of tokens or of tensors [T], or a tensor [B, T].
            max_new_tokens: for each of them.
            temperature: 0 takes the most probable token; more samples.
            top_k: only among so many of the most probable tokens.
            tokenizer: makes tokens of text and text of tokens (`encode`, `decode`, and `eos_token_id` where it has one); it stays
                here.
            on_done: called with the number of a prompt and what follows it, in their order, as they come.
            progress: as for `validate`; counts prompts.
            more: `end`, the token after which a prompt is done, if not the tokenizer's; `context`, how many of the last tokens
                the model sees at most, as one with a table of positions needs it; `on_tokens`, called with the number of a prompt
                in work and what follows it so far, a few times a second, several prompts among each other (not with beams,
                which take tokens back); and further arguments of transformers' `generate`, as plain data.

        Returns:
            What follows each prompt: texts with a tokenizer, else lists of tokens; the end token is the last one where it came.

        Raises:
            ClusterError: a run is in progress, or no worker is here.
            ConfigError: a prompt or a number is wrong; or workers hold parts of the model only.
            RemoteError: the model raised on a worker.
        """
        encode = None if tokenizer is None else tokenizer.encode
        rows = prompts_of(prompts, encode)
        on_tokens = more.pop("on_tokens", lambda number, found: None)
        end, context = more.pop("end", getattr(tokenizer, "eos_token_id", None)), more.pop("context", None)
        sampling = Sampling(max_new_tokens, temperature, top_k, seed, end, context, more)

        def text(tokens: list[int]) -> Any:
            if tokenizer is None:
                return tokens
            return tokenizer.decode(tokens[:-1] if tokens[-1:] == [end] else tokens)

        found: list[Any] = []

        def done(number: int, tokens: list[int]) -> None:
            found.append(text(tokens))
            on_done(number, found[-1])

        replica_set, cluster = self._for_question(None, None), self._open_cluster()
        with reporting("generating", progress) as report:
            generate(
                cluster, replica_set, rows, sampling, on_done=done, progress=report,
                on_tokens=lambda number, tokens: on_tokens(number, text(tokens)), grace_s=self.config.interrupt_grace_s,
            )  # fmt: skip
        return found

    def _empty_groups(self) -> None:
        self._replica_sets.empty_groups()
