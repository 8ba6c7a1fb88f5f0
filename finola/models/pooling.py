"""Attentional pooling: the encoder's map (B, W, h, w) -> one vector q (B, C) (paper, appendix "Network
architectures": a single multi-head attention layer with a learnable query)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finola.errors import FinolaError, check_choice

POOLINGS = ("positions", "plain")


class AttentionPool(nn.Module):
    """One learned query attends to the positions of a map; keys and values are linear in it.

    How attention starts decides how fast the whole model learns: heads that all attend everywhere see the mean image
    only. With pooling="positions" the keys also carry a learned position embedding, and

    - start="random": embeddings of unit variance and a query of standard deviation 4, so that each head
      starts at places of its own;
    - start="cells": head p attends to position p alone, and its value dimensions hold that position's code.
      It needs as many heads as positions (see `finola.models.linear_start`).

    With pooling="plain" it is as the paper prints it: "the encoder output serves as both the keys and values", without
    positions, and the query starts as learned tokens do, at a standard deviation of 0.02.

    The query is a constant, so its own projection would be the product of two constants and is left out.

    Args:
        in_channels: W, channels of the map.
        dim: C, length of q.
        size: (h, w) of the map.
        num_heads: heads, C / 64 by default (at least one); must divide C.
        pooling, start: see above.
    """

    position: nn.Parameter | None  # (h w, W)

    def __init__(self, in_channels: int, dim: int, size: tuple[int, int], num_heads: int | None = None,
                 start: str = "random", pooling: str = "positions"):
        super().__init__()
        check_choice("pooling", pooling, POOLINGS)
        plain = pooling == "plain"
        self.size = size
        self.num_heads = num_heads or max(1, dim // 64)
        if dim % self.num_heads:
            raise FinolaError(f"pool_heads: {self.num_heads} heads do not divide embed_dim {dim}")
        positions = self.size[0] * self.size[1]
        self.position = None if plain else nn.Parameter(nn.init.normal_(torch.empty(positions, in_channels)))
        self.query = nn.Parameter(nn.init.normal_(torch.empty(dim), std=0.02 if plain else 4))
        self.key = nn.Linear(in_channels, dim)
        self.value = nn.Linear(in_channels, dim)
        self.out = nn.Linear(dim, dim)
        for layer in (self.key, self.value, self.out):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        if start == "cells":
            self._attend_to_own_cell(positions, in_channels, dim)
        elif start != "random":
            raise FinolaError(f"pool start: got {start!r}, expected 'random' or 'cells'")

    @torch.no_grad()
    def _attend_to_own_cell(self, positions: int, in_channels: int, dim: int, logit: float = 8.0) -> None:
        if self.position is None:
            raise FinolaError("pooling: 'plain' has no positions for a start in cells, which start 'shifts' wants; "
                              "take pooling 'positions' or start 'random'")
        if self.num_heads != positions or in_channels < positions:
            raise FinolaError(f"pool start 'cells': {self.num_heads} heads for {positions} positions of "
                              f"{in_channels} channels; it needs one head for each position, and as many channels")
        head_dim = dim // positions
        nn.init.orthogonal_(self.position, gain=in_channels**0.5)  # unit variance, (h w, W)
        key = self.key.weight.view(positions, head_dim, in_channels)
        key.mul_(0.02)
        key[:, 0] = self.position / in_channels  # 1 at the own position, 0 at the others
        query = self.query.view(positions, head_dim)
        query.zero_()
        query[:, 0] = logit * head_dim**0.5  # scaled dot product: `logit` at the own position
        nn.init.eye_(self.out.weight)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, W, h, w) -> q (B, C)."""
        batch, _, height, width = features.shape
        if (height, width) != self.size:
            raise FinolaError(f"pooling: got a {height}x{width} map, expected {self.size[0]}x{self.size[1]}: "
                              "the model is made for one image size")
        tokens = features.flatten(2).mT  # (B, N, W)
        placed = tokens if self.position is None else tokens + self.position.to(tokens.dtype)
        key = self._heads(self.key(placed))  # (B, heads, N, C / heads)
        value = self._heads(self.value(tokens))
        query = self.query.to(key.dtype).view(1, self.num_heads, 1, -1).expand(batch, -1, -1, -1)
        pooled = F.scaled_dot_product_attention(query, key, value)  # (B, heads, 1, C / heads)
        q: Tensor = self.out(pooled.flatten(1))
        return q

    def _heads(self, x: Tensor) -> Tensor:
        """x (B, N, C) -> (B, heads, N, C / heads)."""
        heads: Tensor = x.unflatten(-1, (self.num_heads, -1))
        return heads.transpose(1, 2)


    @torch.no_grad()
    def take_over(self, donor: AttentionPool) -> bool:
        """Load another pooling, the positions resampled to this size; False, and nothing done, where it does not fit:
        another width, C, number of heads, or positions in one of the two alone."""
        same = [(tuple(p.key.weight.shape), p.num_heads, p.position is None) for p in (self, donor)]
        if same[0] != same[1]:
            return False
        state = donor.state_dict()
        if donor.position is not None:
            state["position"] = resample_positions(donor.position, donor.size, self.size)
        self.load_state_dict(state)
        return True

    @torch.no_grad()
    def start_as_mean(self, projection: nn.Linear | None) -> None:
        """Let q start as a weighted mean of the map, each head with weights of its own: values and output pass the
        W = C channels on, or `projection` of them (W -> C)."""
        if projection is None:
            nn.init.eye_(self.value.weight)
        else:
            self.value.load_state_dict(projection.state_dict())
        nn.init.eye_(self.out.weight)


def resample_positions(position: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """(h w, W) embeddings of one grid -> those of another, at the variance they had."""
    grid = position.T.reshape(1, -1, *old)
    resized = F.interpolate(grid, size=new, mode="bicubic", align_corners=False)[0].flatten(1).T
    return resized * (position.std() / resized.std())
