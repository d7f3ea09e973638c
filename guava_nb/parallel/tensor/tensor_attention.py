"""nn.MultiheadAttention of which each rank has some heads. Names and full shapes of its parameters stay torch's.

Shapes: B batch, T targets (queries), S sources (keys and values), H the whole width, N all heads, n this rank's heads, D a
head's width, so H = N D. Scaled dot-product attention: Vaswani et al. 2017, arXiv:1706.03762.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from guava_nb.parallel.state.shard_layout import Layout
from guava_nb.parallel.tensor.tensor_layers import RowLinear, part_of, ranges_of
from guava_nb.parallel.tensor.tensor_ops import Ranks, enter, gather, total
from guava_nb.parallel.tensor.tensor_random import SplitRandomness

__all__ = ["SplitAttention"]

_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class SplitAttention(nn.Module):
    """Takes the place of nn.MultiheadAttention, with the same arguments and outputs.

    torch's encoder layer asks its attention for some attributes to choose a fused kernel, which would use a part of the
    weights as if they were whole; `_qkv_same_embed_dim` is False so that it does not.
    """

    _qkv_same_embed_dim = False
    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    num_heads: int

    def __init__(self, whole: nn.MultiheadAttention, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.embed_dim, self.num_heads, self.head_dim = whole.embed_dim, whole.num_heads, whole.head_dim
        self.dropout, self.batch_first = float(whole.dropout), bool(whole.batch_first)
        self.randomness = SplitRandomness(ranks.rank) if self.dropout else None
        cuts = ranges_of(whole.num_heads, ranks.size)
        self.heads = [end - start for ((start, end),) in cuts]
        self.first_head = cuts[ranks.rank][0][0]
        self.layouts: dict[str, Layout] = {}
        fused = ranges_of(3 * whole.embed_dim, ranks.size, whole.head_dim, repeats=3)[ranks.rank]
        single = ranges_of(whole.embed_dim, ranks.size, whole.head_dim)
        self._take("in_proj_weight", whole.in_proj_weight, fused)
        self._take("in_proj_bias", whole.in_proj_bias, fused)
        for name in _SEPARATE:
            self._take(name, getattr(whole, name), single[ranks.rank])
        self.out_proj = RowLinear(whole.out_proj, ranks, single, scatters=False)

    def _take(self, name: str, parameter: Tensor | None, own: list[tuple[int, int]]) -> None:
        """Register this rank's rows of a weight `[H or 3 H, I]` or bias `[H or 3 H]`; None where there is none."""
        if isinstance(parameter, nn.Parameter):
            self.layouts[name] = Layout.ranges(tuple(parameter.shape), 0, own)
            self.register_parameter(name, part_of(parameter, self.layouts[name]))
        else:
            self.register_parameter(name, None)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with this rank's heads and add the ranks up; arguments and results as of nn.MultiheadAttention.

        Returns:
            `[B, T, H]` (`[T, B, H]` without `batch_first`, `[T, H]` unbatched), and the weights of all heads
            `[B, N, T, S]`, or their mean `[B, T, S]`; None where they are not asked for.
        """
        batched = query.dim() == 3
        inputs = [query, key, value]
        if not batched:
            inputs = [t.unsqueeze(0) for t in inputs]
            key_padding_mask = key_padding_mask.unsqueeze(0) if key_padding_mask is not None else None
        elif not self.batch_first:
            inputs = [t.transpose(0, 1) for t in inputs]
        q, k, v = (self._split_heads(t) for t in self._project(*inputs))
        mask = self._mask(q, key_padding_mask, attn_mask)
        attended, weights = self._attend(q, k, v, mask, need_weights)
        output = self.out_proj(attended.transpose(1, 2).flatten(2))
        if batched and not self.batch_first:
            output = output.transpose(0, 1)
        if weights is not None:
            weights = self._all_weights(weights, average_attn_weights)
        if not batched:
            output, weights = output.squeeze(0), weights.squeeze(0) if weights is not None else None
        return output, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query `[B, T, n D]`, key and value `[B, S, n D]` of this rank's heads, from whole inputs `[B, T or S, I]`."""
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        weights = (
            self.in_proj_weight.chunk(3)
            if self.in_proj_weight is not None
            else [getattr(self, name) for name in _SEPARATE]
        )
        inputs = [enter(t, self.ranks) for t in (query, key, value)]
        if self.randomness is not None and self.training:
            self.randomness.enter(id(self), query.device)
            self.out_proj.randomness = self.randomness
        q, k, v = (functional.linear(t, w, b) for t, w, b in zip(inputs, weights, biases, strict=True))
        return q, k, v

    def _split_heads(self, tensor: Tensor) -> Tensor:
        """Return `[B, n, T or S, D]` of `[B, T or S, n D]`; a view."""
        heads = self.heads[self.ranks.rank]
        return tensor.view(*tensor.shape[:2], heads, self.head_dim).transpose(1, 2)

    def _mask(self, q: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Join both masks into one to be added to the scores: `[B or 1, n or 1, T or 1, S]`; None where there is none.

        Args:
            q: `[B, n, T, D]`.
            padding: `[B, S]`, of sources that are no tokens.
            mask: `[T, S]`, or `[B N, T, S]` for all heads.
        """
        joined = None
        if mask is not None:
            joined = _additive(mask, q)
            if joined.dim() == 3:
                all_heads = joined.view(q.shape[0], self.num_heads, *joined.shape[1:])
                joined = all_heads[:, self.first_head : self.first_head + q.shape[1]]
            else:
                joined = joined[None, None]
        if padding is not None:
            hidden = _additive(padding, q)[:, None, None, :]
            joined = hidden if joined is None else joined + hidden
        return joined

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return what the heads see, `[B, n, T, D]`, and their weights `[B, n, T, S]`, None where they are not asked for."""
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout), None
        scores = (q / math.sqrt(self.head_dim)) @ k.transpose(-2, -1)
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        weights = functional.dropout(weights, dropout) if dropout else weights
        return weights @ v, weights

    def _all_weights(self, weights: Tensor, average: bool) -> Tensor:
        """Return the weights of all ranks' heads: `[B, n, T, S]` to `[B, N, T, S]`, or to their mean `[B, T, S]`."""
        if average:
            summed: Tensor = total(weights.sum(dim=1), self.ranks)
            return summed / self.num_heads
        all_heads = gather(weights.movedim(1, -1), self.ranks, self.heads)
        return all_heads.movedim(-1, 1)


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask in the dtype of `like`, to be added: a bool one has -inf where it is True; any shape."""
    if mask.dtype == torch.bool:
        zeros: Tensor = torch.zeros_like(mask, dtype=like.dtype)
        return zeros.masked_fill(mask, float("-inf"))
    return mask.to(like.dtype)
