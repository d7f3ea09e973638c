"""One model in torch's terms: which layers get which style, which heads are divided, where stages begin, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from guava_nb.errors import ConfigError
from guava_nb.export.layout import classes_are_last, layout_of
from guava_nb.protocol.messages import ParallelSpec
from tests.support.spread import Attention, FusedAttention

COLUMN, ROW = "ColwiseParallel()", "RowwiseParallel()"
GATHERED, CUT = "ColwiseParallel(output_layouts=Replicate())", "RowwiseParallel(input_layouts=Replicate())"


class Wide(nn.Module):
    """Two layers beside the way."""

    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Blocks in a list."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tensor(model: nn.Module, ranks: int = 2) -> object:
    return layout_of(model, ParallelSpec(mode="tensor", tp=ranks))


def test_layers_that_repeat_have_one_pattern() -> None:
    assert tensor(Stack(Wide(), Wide())).styles == {"blocks.*.up": COLUMN, "blocks.*.down": ROW}


class Numbered(nn.Sequential):
    """Blocks by name and number, as in many GPTs, and a layer beside them."""

    def __init__(self, make: Callable[[], nn.Module], blocks: int = 2) -> None:
        super().__init__()
        for number in range(blocks):
            self.add_module(f"block{number}", make())
        self.add_module("norm", nn.LayerNorm(8))


def test_layers_of_blocks_with_numbered_names_have_one_pattern() -> None:
    assert tensor(Numbered(Wide)).styles == {"block*.up": COLUMN, "block*.down": ROW}
    mixed = nn.ModuleDict({"block0": Wide(), "block1": Wide(hidden=11)})
    mixed.forward = lambda x: mixed["block1"](mixed["block0"](x))  # type: ignore[method-assign]
    assert tensor(mixed).styles == {"block0.up": COLUMN, "block0.down": ROW, "block1.up": GATHERED, "block1.down": CUT}


def test_sizes_that_do_not_divide_are_gathered_around_each_layer() -> None:
    assert tensor(Wide(hidden=11)).styles == {"up": GATHERED, "down": CUT}


def test_a_whole_parameter_between_split_layers_keeps_activations_whole() -> None:
    found = tensor(Attention())
    assert set(found.styles.values()) == {GATHERED, CUT} and found.heads == {}


def test_several_weights_in_one_are_gathered() -> None:
    found = tensor(FusedAttention())
    assert found.styles == {"c_attn": GATHERED, "c_proj": CUT} and found.heads == {}


def test_heads_are_divided_where_each_process_has_as_many() -> None:
    class Plain(Attention):
        """Without the norm inside the heads."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.Identity()

    found = tensor(Plain())
    assert found.styles == {"q_proj": COLUMN, "k_proj": COLUMN, "v_proj": COLUMN, "o_proj": ROW}
    assert {name: set(values) for name, values in found.heads.items()} == {"": {"n_heads", "n_kv_heads"}}

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Plain()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.attention(x)

    assert tensor(Stack(Block(), Block())).heads.keys() == {"blocks.*.attention"}
    ((layers, attributes),) = tensor(Numbered(Block)).head_lines
    assert layers == "block*.attention" and set(attributes) == {"n_heads", "n_kv_heads"}


def test_blocks_for_fsdp_read_as_a_person_would_write_them() -> None:
    spec = ParallelSpec(mode="zero", dp=2, zero_stage=3)
    assert layout_of(Stack(Stack(Wide()), Stack(Wide()), Stack(Wide())), spec).blocks == "model.blocks"
    named = layout_of(Numbered(lambda: Stack(Wide()), 3), spec)
    assert (named.blocks, named.stem) == ("model.named_children()", "block")


def test_an_attention_of_torch_stays_whole_and_where_nothing_is_left_the_run_is_refused() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    with pytest.raises(ConfigError, match="can split none of the layers"):
        tensor(Attending())


def test_stages_of_a_sequence_are_cut_between_its_layers() -> None:
    found = layout_of(nn.Sequential(Wide(), Wide(), Wide(), Wide()), ParallelSpec(mode="pipeline", pp=2))
    assert (found.cuts, found.begins, found.stages) == ((0, 2), ("2",), 2)


def test_stages_of_another_model_are_named() -> None:
    found = layout_of(Stack(Wide(), Wide()), ParallelSpec(mode="pipeline", pp=2))
    assert (found.cuts, found.begins) == ((), ("blocks.1",))


def test_one_weight_in_two_stages_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(ConfigError, match="are one parameter"):
        layout_of(model, ParallelSpec(mode="pipeline", pp=2))


def test_the_axis_of_classes_is_seen_by_a_row_of_zeros() -> None:
    words = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5))
    assert classes_are_last(words, torch.zeros(1, 3, dtype=torch.int64), (9, 3))
    assert not classes_are_last(nn.Conv2d(3, 5, 1), torch.zeros(1, 3, 2, 2), (9, 2, 2))
    with pytest.raises(ConfigError, match="share a loss function"):
        classes_are_last(words, torch.zeros(1, 3), (9, 3))
