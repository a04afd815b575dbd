"""Dynamic trees whose siblings are sampled: EAGLE-2's idea of a tree that follows the draft's confidence, at temperatures above 0.

EAGLE-2 takes the draft's likeliest tokens as children. At T > 0 a child x is then accepted with probability p(x) alone, which
is little where the target's distribution is flat; a token *sampled* from q is accepted with min(1, p(x) / q(x)). But EAGLE-2's
re-ranking, which drops nodes for their own q after they were drawn, would bias the law with sampled children: what survives it
is no longer a sample from q (`tests/eval/test_sampled.py` plants that fault and catches it). So nothing that was drawn is
dropped here, and every draw is decided on before it is made, as in DySpec (arXiv 2410.11744).

**Why that is exact.** Call a *slot* the next child of a node: its k-th draw from q without the k − 1 tokens drawn there before.
The tree grows by one slot at a time, and which slot is next, and whether there is a next one, depends only on draws made before
(of any node). Let the verifier have reached a node, rejected its first k − 1 children, and let r be the residual that the rule
(rejection recursively, q renormalised after each) has left of p there. Claim: whatever else was drawn in the tree so far, the
token emitted at this place follows r. If there is no k-th child, r is what the rule samples from. If there is one, its token
was drawn from q without its elder siblings, *independently of everything drawn before it*, that is of all on which its
existence depends; what was drawn after it, the rule reads only once it has decided on it, or never: the elder siblings and
ancestors of a node are drawn before it, and a rejected sibling's branch is never read. So it is accepted or replaced by the
next residual exactly as in a tree of fixed shape, and the claim follows by induction over the remaining siblings. A rule that
looked at a drawn token to decide whether that same token stays would break the italic words.

Knows how a drafter is asked (`growth.Grower`) and nothing of the target.
"""

import heapq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftsmith.eval.sampling import Sampler, draw
from draftsmith.eval.tree import Dynamic, Proposal

if TYPE_CHECKING:
    from draftsmith.eval.growth import Grower

#: Expected acceptance of a first child that had next to no probability, and what is left of it with every sibling rejected before.
#: Measured on the demo's head at T = 1; they decide which nodes are drawn and never what is emitted.
FIRST, FADE = 0.7, 0.35
TYPICAL = 0.2  # what a token that was drawn had as probability


def expected_acceptance(share: float, rank: int) -> float:
    """Of the child of this rank, drawn with probability `share`: 1 for a certain one, falling to `FIRST` for an unlikely one."""
    return FADE**rank * (1.0 - (1.0 - FIRST) * (1.0 - share))


class _Slot(NamedTuple):
    """The next child of a node. Slots sort by −gain, the expected number of tokens that it adds before anything is known of it;
    reached: how probably the verifier comes to it; rank: how many children the node has."""

    loss: float
    reached: float
    node: int
    rank: int


def _slot(reached: float, node: int, rank: int) -> _Slot:
    return _Slot(-reached * expected_acceptance(TYPICAL, rank), reached, node, rank)


class _Row:
    """One prompt's tree. Nodes are numbered in the order of drawing; value: the expected probability that a node is accepted."""

    def __init__(self, root: int, stream: np.random.Generator) -> None:
        self.tokens, self.parents, self.values = [root], [-1], [1.0]
        self.q: dict[int, np.ndarray] = {}  # of each node that has been run: what its children are drawn from
        self._left: dict[int, np.ndarray] = {}  # the same without the children drawn so far
        self._stream = stream
        self._level: list[_Slot] = []  # of nodes of the newest level
        self._older: list[_Slot] = []

    def open(self, node: int, q: np.ndarray) -> None:
        """Children of this node may be drawn from q [V_d]."""
        self.q[node], self._left[node] = q, q.copy()
        heapq.heappush(self._level, _slot(self.values[node], node, 0))

    def grow_level(self, budget: int, levels: int) -> list[int]:
        """Draw this level's children that are worth it: the new nodes. `levels`: how many can follow, this one included."""
        worst, first = self._worst(budget, levels), len(self.tokens)
        while self._level and len(self.tokens) < first + budget and self._level[0].loss <= worst:
            self._draw(self._level)
        self._older += self._level
        self._level = []
        return list(range(first, len(self.tokens)))

    def fill(self, budget: int) -> None:
        """Spend what is left of the budget on younger siblings of nodes of all levels."""
        heapq.heapify(self._older)
        while self._older and budget:
            self._draw(self._older)
            budget -= 1

    def _draw(self, slots: list[_Slot]) -> None:
        slot = heapq.heappop(slots)
        left = self._left[slot.node]
        token = draw(left, self._stream.random())
        accepted = expected_acceptance(float(left[token] / left.sum()), slot.rank)
        self.tokens.append(token)
        self.parents.append(slot.node)
        self.values.append(slot.reached * accepted)
        left[token] = 0.0
        if left.any():
            heapq.heappush(slots, _slot(slot.reached * (1.0 - accepted), slot.node, slot.rank + 1))

    def _worst(self, budget: int, levels: int) -> float:
        """The loss of the last of the `budget` best slots, if every draw from now on were a typical one."""
        slots = [(slot.loss, slot.reached, levels, slot.rank) for slot in self._level]
        slots += [(slot.loss, slot.reached, 1, slot.rank) for slot in self._older]  # their nodes are not run any more
        heapq.heapify(slots)
        loss = 0.0
        for _ in range(budget if slots else 0):
            loss, reached, below, rank = heapq.heappop(slots)
            accepted = expected_acceptance(TYPICAL, rank)
            younger = _slot(reached * (1.0 - accepted), 0, rank + 1)
            heapq.heappush(slots, (younger.loss, younger.reached, below, rank + 1))
            if below > 1:
                child = _slot(reached * accepted, 0, 0)
                heapq.heappush(slots, (child.loss, child.reached, below - 1, 0))
        return loss


def grow_sampled(drafter: "Grower", roots: Tensor, logits: Tensor, shape: Dynamic, sampler: Sampler) -> Proposal:
    """A tree of at most `shape.budget` sampled nodes and `shape.depth` levels below each root [B]; logits [B, V_d] after them.

    Of each level the `shape.width` nodes of the largest value are run, so that they may have children.
    """
    rows = [_Row(root, stream) for root, stream in zip(roots.tolist(), sampler.streams, strict=True)]
    run: list[list[int]] = [[0] for _ in rows]  # nodes in the order in which the drafter ran them
    levels = [[0] for _ in rows]
    visible = np.zeros((len(rows), 1, 0), dtype=bool)
    level_logits, count = logits[:, None], 1
    for depth in range(1, shape.depth + 1):
        q = sampler.probabilities(level_logits).numpy()
        for index, row in enumerate(rows):
            for place, node in enumerate(levels[index]):
                row.open(node, q[index, place])
            drawn = row.grow_level(shape.budget + 1 - len(row.tokens), shape.depth + 1 - depth)
            levels[index] = sorted(heapq.nlargest(shape.width, drawn, row.values.__getitem__))
        before, count = count, max(map(len, levels))
        if depth == shape.depth or count == 0:
            break
        padded = [
            _padded(row, nodes, run[i], before, count) for i, (row, nodes) in enumerate(zip(rows, levels, strict=True))
        ]
        tokens, parents = torch.tensor(padded).unbind(2)
        visible = _extended(visible, parents.tolist())
        mask = torch.from_numpy(visible[:, -count:])
        level_logits = drafter.extend(drafter.vocabulary.to_target(tokens), parents, mask, depth)
    for row in rows:
        row.fill(shape.budget + 1 - len(row.tokens))
    return _proposal(drafter, roots, rows)


def _padded(row: _Row, nodes: list[int], run: list[int], before: int, count: int) -> list[tuple[int, int]]:
    """Draft token and parent (as `Grower.extend` counts) of each of `nodes`, then of padding, which is run like any node: the first
    one again, or where there is none some token below the level before, whose `before` nodes end `run`. Appends them to `run`."""
    entries = [(row.tokens[node], run.index(row.parents[node])) for node in nodes]
    entries = entries or [(0, len(run) - before)]
    run += nodes + (nodes[:1] or [-1]) * (count - len(nodes))
    return entries + entries[:1] * (count - len(entries))


def _extended(visible: np.ndarray, parents: list[list[int]]) -> np.ndarray:
    """visible [B, 1 + n, n]: which run nodes (the root left out) the root and each run node sees. The same with the w new nodes."""
    batch, _, before = visible.shape
    count = len(parents[0])
    grown = np.zeros((batch, 1 + before + count, before + count), dtype=bool)
    grown[:, : 1 + before, :before] = visible
    for index, above in enumerate(parents):
        grown[index, 1 + before :, :before] = visible[index, above]
    grown[:, 1 + before :, before:] = np.eye(count, dtype=bool)
    return grown


def _proposal(drafter: "Grower", roots: Tensor, rows: list[_Row]) -> Proposal:
    vocabulary = drafter.vocabulary
    count = max(len(row.tokens) for row in rows)
    tokens = torch.zeros(len(rows), count, dtype=torch.long)
    parents = torch.zeros(len(rows), count, dtype=torch.long)
    q = torch.zeros(len(rows), count, vocabulary.target_size, dtype=torch.float64)
    for index, row in enumerate(rows):
        size = len(row.tokens)
        tokens[index, 1:size] = vocabulary.to_target(torch.tensor(row.tokens[1:], dtype=torch.long))
        parents[index, :size] = torch.tensor(row.parents)
        nodes = [node for node in row.q if node in set(row.parents)]
        if nodes:
            q[index, nodes] = vocabulary.widen(torch.from_numpy(np.stack([row.q[node] for node in nodes])))
    tokens[:, 0] = roots
    return Proposal(tokens, parents, torch.tensor([len(row.tokens) for row in rows]), q)
