"""Prompts continued by one, two and three workers: the tokens of one process, greedy and sampled, in their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb.errors import ConfigError
from guava_nb.replica.model.generate import Sampling, continued
from tests.support.direct import _OF
from tests.support.session import direct_session
from tests.unit.replica.model.test_generate import Language

PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [2, 2]]


class Letters:
    """A tokenizer of letters; "z" ends."""

    eos_token_id = 12

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_tokens_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    tokens = torch.arange(60).reshape(15, 4) % 13
    loader = DataLoader(TensorDataset(tokens, tokens.roll(-1, 1)), batch_size=5)
    with direct_session(workers) as session:
        session.register_model(Language)
        session.start_training(
            loader, criterion=_loss, num_epochs=1, optimizer="SGD", optimizer_args={"lr": 0.1}, precision="fp64",
            progress=False,
        )  # fmt: skip
        net = session.run.model().eval()
        for settings in ({}, {"temperature": 0.8, "top_k": 5, "seed": 3}):
            told: list[Any] = []
            grown: dict[int, list[list[int]]] = {}
            found = session.generate(
                PROMPTS, 9, progress=False, on_done=lambda number, row, told=told: told.append((number, row)),
                on_tokens=lambda number, row, grown=grown: grown.setdefault(number, []).append(row), **settings,
            )  # fmt: skip
            assert all(part == found[number][: len(part)] for number, parts in grown.items() for part in parts)
            plain = [
                continued(net, torch.tensor(prompt), Sampling(9, **settings), number).tolist()
                for number, prompt in enumerate(PROMPTS)
            ]
            assert found == plain and told == list(enumerate(plain))
        texts = session.generate(["abc", "d"], 9, tokenizer=Letters(), progress=False)
        ids = [continued(net, torch.tensor(prompt), Sampling(9, end=12)).tolist() for prompt in ([0, 1, 2], [3])]
        assert texts == [Letters().decode(row[:-1] if row[-1] == 12 else row) for row in ids]
        _refusals(session)


def test_what_is_interrupted_ends_at_the_workers_and_what_is_lost_goes_on_elsewhere() -> None:
    tokens = torch.arange(60).reshape(15, 4) % 13
    with direct_session(2) as session:
        session.register_model(Language)
        loader = DataLoader(TensorDataset(tokens, tokens.roll(-1, 1)), batch_size=5)
        session.start_training(loader, criterion=_loss, num_epochs=1, optimizer="SGD", progress=False)
        net = session.run.model().eval()

        def stop(number: int, row: list[int]) -> None:
            raise KeyboardInterrupt

        with pytest.raises(
            KeyboardInterrupt
        ):  # without an end they would compute for minutes, and what follows would wait
            session.generate(PROMPTS, 50_000, on_tokens=stop, progress=False)
        grown: dict[int, list[int]] = {}
        lost: list[int] = []

        def lose(number: int, row: list[int]) -> None:
            assert row[: len(grown.get(number, []))] == grown.get(number, []), "it goes on, also elsewhere"
            grown[number] = row
            if not lost:
                lost.append(number)
                _OF[session._cluster][0].die()

        found = session.generate(PROMPTS, 60, on_tokens=lose, progress=False)
        plain = [continued(net, torch.tensor(prompt), Sampling(60)).tolist() for prompt in PROMPTS]
        assert lost and found == plain


def _refusals(session: Any) -> None:
    for prompts, settings, why in [
        ([], {}, "there is no prompt"),
        (["a"], {}, "need tokenizer="),
        (3, {}, "prompts are of type int: give text"),
        (DataLoader(TensorDataset(torch.zeros(3, 2), torch.zeros(3))), {}, "not a DataLoader"),
        ([[1], ["a"]], {}, "prompt 1 is a list that makes no row of tokens"),
        ([[1], []], {}, "prompt 1 is no row of tokens"),
        ([[0.5]], {}, "prompt 0 is no row of tokens"),
        ([[1]], {"top_k": 3}, "give a temperature above 0"),
        ([[1]], {"temperature": -1}, "temperature is -1"),
        ([[1]], {"num_beams": 2}, "num_beams: only a model of transformers"),
    ]:
        with pytest.raises(ConfigError, match=why):
            session.generate(prompts, progress=False, **settings)


def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
