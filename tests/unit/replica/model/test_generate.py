"""Tokens that follow a prompt: greedy and sampled as written out by hand, the same beside any other prompts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from guava_nb.errors import ConfigError
from guava_nb.replica.model.generate import NO_TOKEN, Sampling, continued, generate_rows


class Language(nn.Module):
    """The next token depends on all before it."""

    def __init__(self, vocabulary: int = 13) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens).cumsum(1).tanh() * 5)


def model() -> Language:
    torch.manual_seed(0)
    return Language().double().eval()


def by_hand(net: nn.Module, prompt: list[int], new: int, temperature: float, top_k: int | None, seed: int) -> list[int]:
    tokens, random = list(prompt), torch.Generator().manual_seed(seed)
    for _ in range(new):
        scores = net(torch.tensor([tokens]))[0, -1].detach()
        if temperature == 0:
            tokens.append(int(scores.argmax()))
            continue
        ordered = (scores / temperature).sort(descending=True)
        kept = ordered.values[: top_k or len(scores)].softmax(0)
        tokens.append(int(ordered.indices[int(torch.multinomial(kept, 1, generator=random))]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, None), (1.0, None), (0.7, 4), (2.0, 99)])
def test_tokens_are_those_of_a_loop_by_hand(temperature: float, top_k: int | None) -> None:
    net = model()
    for seed in range(5):
        found = continued(net, torch.tensor([1, 2, 3]), Sampling(12, temperature, top_k, seed))
        assert found.tolist() == by_hand(net, [1, 2, 3], 12, temperature, top_k, seed)


def test_a_prompt_is_continued_alike_beside_others_and_leaves_the_random_state() -> None:
    net, prompts = model(), [[1, 2, 3], [4], [5, 6]]
    torch.manual_seed(9)
    before = torch.get_rng_state()
    batch = {
        "tokens": torch.tensor([[1, 2, 3], [4, 0, 0], [5, 6, 0]]), "length": torch.tensor([3, 1, 2]),
        "number": torch.tensor([0, 1, 2]),
    }  # fmt: skip
    together = generate_rows(net, batch, sampling={"new": 6, "temperature": 1.0, "seed": 7})
    assert torch.equal(before, torch.get_rng_state())
    assert together.tolist() == [by_hand(net, prompt, 6, 1.0, None, 7 + row) for row, prompt in enumerate(prompts)]


def test_it_ends_at_the_end_and_sees_no_more_than_the_context() -> None:
    net = model()
    free = by_hand(net, [1, 2], 8, 0.0, None, 0)
    end = free[3]
    cut = free[: free.index(end) + 1]
    assert continued(net, torch.tensor([1, 2]), Sampling(8, end=end)).tolist() == cut
    batch = {"tokens": torch.tensor([[1, 2]]), "length": torch.tensor([2]), "number": torch.tensor([0])}
    rows = generate_rows(net, batch, sampling={"new": 8, "end": end})
    assert rows.tolist() == [cut + [NO_TOKEN] * (8 - len(cut))]
    lengths: list[int] = []
    net.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    continued(net, torch.tensor([1, 2, 3, 4]), Sampling(5, context=3))
    assert lengths == [3] * 5


def test_what_is_no_language_model_is_told() -> None:
    with pytest.raises(ConfigError, match=r"gives logits \[B, T, V\] for tokens \[B, T\]; Sequential gave"):
        continued(nn.Sequential(nn.Embedding(5, 3), nn.Flatten(1)), torch.tensor([1, 2]), Sampling(2))
    with pytest.raises(ConfigError, match="num_beams: only a model of transformers"):
        continued(model(), torch.tensor([1]), Sampling(2, more={"num_beams": 2}))
