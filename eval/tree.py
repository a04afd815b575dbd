"""Token trees: what a drafter proposes and one target forward verifies. A chain is a tree. Knows tokens and masks only."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Proposal:
    """B token trees of at most n nodes. Node 0 is the pending token (the last one emitted, not yet seen by the target).

    tokens [B, n]; parents [B or 1, n] (node 0: −1; a parent always stands before its children); sizes [B] says how many
    nodes of a row are real, the rest is padding at its end. q [B, n, V]: row i is the distribution from which the children of
    node i were drawn, or None if the proposal is deterministic (then each child is a point mass).
    """

    tokens: Tensor
    parents: Tensor
    sizes: Tensor
    q: Tensor | None = None

    @property
    def depths(self) -> Tensor:
        """[B or 1, n]: number of edges from the root."""
        return self.visible.sum(-1) - 1

    @property
    def visible(self) -> Tensor:
        """[B or 1, n, n] bool: node i sees node j iff j is i or an ancestor of i."""
        return _ancestors(tuple(map(tuple, self.parents.tolist())))


@cache
def _ancestors(parents: tuple[tuple[int, ...], ...]) -> Tensor:
    visible = torch.zeros(len(parents), len(parents[0]), len(parents[0]), dtype=torch.bool)
    for row, tree in enumerate(parents):
        for node, parent in enumerate(tree):
            if parent >= 0:
                visible[row, node] = visible[row, parent]
            visible[row, node, node] = True
    return visible


def chain(tokens: Tensor, sizes: Tensor | None = None, q: Tensor | None = None) -> Proposal:
    """Chains [B, n]: every node's parent is the one before it."""
    batch, count = tokens.shape
    full = torch.full((batch,), count, dtype=torch.long)
    return Proposal(tokens, torch.arange(-1, count - 1)[None], full if sizes is None else sizes, q)
