"""Token trees: the shapes that can be asked for, and what a drafter proposes. A chain is a tree. Knows tokens and masks only."""

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from draftsmith.errors import UserError


def depths_of(parents: Sequence[int]) -> list[int]:
    """Edges from the root to each node."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


@dataclass(frozen=True)
class Static:
    """A fixed shape. parents[i] is node i's parent; node 0 is the root (−1), and a parent stands before its children.

    min_confidence: for chains whose drafter knows its own acceptance: drafting stops before a token that it expects to be accepted
    with a lower probability (0: never).
    """

    parents: tuple[int, ...]
    min_confidence: float = 0.0

    def __post_init__(self) -> None:
        wrong = [i for i, parent in enumerate(self.parents) if not (parent == -1 if i == 0 else 0 <= parent < i)]
        if wrong or len(self.parents) < 2:
            raise UserError(f"tree {list(self.parents)}: node 0 has parent -1, every other one an earlier node")
        if not 0 <= self.min_confidence <= 1 or (self.min_confidence and self.depth != self.nodes):
            raise UserError(f"min_confidence {self.min_confidence}: must lie in [0, 1], and only chains can stop early")

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        return tuple(depths_of(self.parents))

    @property
    def depth(self) -> int:
        return max(self.depths)

    @property
    def nodes(self) -> int:
        """Drafted nodes: all but the root."""
        return len(self.parents) - 1

    @property
    def run(self) -> int:
        """Entries that a drafter or the target needs behind the committed ones, the root included."""
        return len(self.parents)

    @functools.cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(i for i, parent in enumerate(self.parents) if parent == node) for node in range(len(self.parents))
        )


@dataclass(frozen=True)
class Dynamic:
    """EAGLE-2's tree (arXiv 2406.16858): at each of `depth` levels the `width` most promising nodes of the level propose their
    `width` likeliest tokens each; of all proposed nodes the `budget` with the largest path product are verified. Where drafts are
    sampled the same three numbers bound a tree of sampled children (`draftsmith.eval.sampled`).

    confidence_temperature: of the draft's softmax that the products are made of. A draft of a flat target is underconfident about
    what greedy decoding will choose, and below 1 its trees grow deeper. It changes which nodes are verified, never what is emitted.
    """

    width: int
    depth: int
    budget: int
    confidence_temperature: float = 1.0

    def __post_init__(self) -> None:
        most = self.width + max(self.depth - 1, 0) * self.width**2
        if self.confidence_temperature <= 0:
            raise UserError(f"tree {self}: confidence_temperature must be above 0")
        if min(self.width, self.depth, self.budget) < 1 or self.budget > most:
            raise UserError(f"tree {self}: width, depth and budget must be at least 1, and the budget at most {most}")

    @property
    def nodes(self) -> int:
        return self.budget

    @property
    def run(self) -> int:
        """Entries that a drafter or the target needs behind the committed ones, the root included."""
        return max(self.budget + 1, self.depth * self.width)


Shape = Static | Dynamic


@cache
def chain_shape(K: int, min_confidence: float = 0.0) -> Static:
    """K tokens, each below the one before; fewer where the drafter is not confident. Raises UserError for K < 1."""
    if K < 1:
        raise UserError(f"K {K}: at least one token must be drafted")
    return Static(tuple(range(-1, K)), min_confidence)


def level_shape(branching: Sequence[int]) -> Static:
    """Every node of depth d has branching[d] children: [3, 3] is the top-3 tree of two levels (12 nodes)."""
    parents, level = [-1], [0]
    for count in branching:
        level_parents = [node for node in level for _ in range(count)]
        level = list(range(len(parents), len(parents) + len(level_parents)))
        parents += level_parents
    return Static(tuple(parents))


def shape_from_paths(paths: Sequence[Sequence[int]]) -> Static:
    """The tree with these paths of child ranks, such as [[0], [1], [0, 0]]: the form that Medusa and EAGLE-1 write trees in."""
    ordered = sorted(map(tuple, paths), key=lambda path: (len(path), path))
    number: dict[tuple[int, ...], int] = {(): 0}
    for path in ordered:
        rank = path[-1]
        if path[:-1] not in number or (rank > 0 and (*path[:-1], rank - 1) not in number):
            raise UserError(f"tree path {list(path)}: its parent and its likelier siblings must be in the tree too")
        number[path] = len(number)
    return Static((-1, *(number[path[:-1]] for path in ordered)))


#: How often a node's likeliest child is accepted, its second likeliest, and so on: of no draft in particular.
ASSUMED = (0.6, 0.2, 0.1, 0.05, 0.025, 0.0125, 0.00625, 0.003)


def as_shape(tree: "Shape | str | Sequence[int] | None", K: int, nodes: int = 32, width: int = 8) -> "Shape":
    """A shape of depth K by its name: "chain" (or None), "static" (the best tree of `nodes` for `ASSUMED` acceptance), "dynamic";
    or by the parent of each node. Raises UserError."""
    if tree is None or tree == "chain":
        return chain_shape(K)
    if tree == "dynamic":
        return Dynamic(width, K, nodes)
    if tree == "static":
        return optimal_shape([ASSUMED[:width]] * K, nodes)
    if isinstance(tree, str):
        raise UserError(f"tree {tree!r}: there are chain, static and dynamic, or a list of parents")
    return tree if isinstance(tree, Static | Dynamic) else Static(tuple(tree))


def optimal_shape(profile: Sequence[Sequence[float]], budget: int) -> Static:
    """The tree of `budget` drafted nodes that emits the most tokens, for a measured acceptance profile.

    profile[d][r]: probability that the child of rank r of an accepted node at depth d is accepted (falling in r). The expected
    number of accepted tokens is the sum, over the tree's nodes, of the product of these along the node's path. A node's product
    never exceeds its parent's or its likelier sibling's, so the `budget` nodes with the largest products form a tree, and
    none of that size has a larger sum: what Sequoia (arXiv 2402.12374) finds by dynamic programming, best-first finds directly.
    """
    frontier: list[tuple[float, int, tuple[int, ...]]] = []

    def offer(path: tuple[int, ...], above: float) -> None:
        depth, rank = len(path) - 1, path[-1]
        if depth < len(profile) and rank < len(profile[depth]) and profile[depth][rank] > 0:
            heapq.heappush(frontier, (-above * profile[depth][rank], depth, path))

    offer((0,), 1.0)
    reach: dict[tuple[int, ...], float] = {(): 1.0}
    while frontier and len(reach) <= budget:
        negative, _, path = heapq.heappop(frontier)
        reach[path] = -negative
        offer((*path, 0), reach[path])
        offer((*path[:-1], path[-1] + 1), reach[path[:-1]])
    return shape_from_paths([path for path in reach if path])


@dataclass(frozen=True)
class Proposal:
    """B token trees of at most n nodes. Node 0 is the pending token (the last one emitted, not yet seen by the target).

    tokens [B, n]; parents [B or 1, n] (node 0: −1; a parent always stands before its children); sizes [B] says how many
    nodes of a row are real, the rest is padding at its end. q [B, n, V]: row i is the distribution from which the children of
    node i were drawn, or None if the proposal is deterministic (then each child is a point mass). scores [B, n]: of a dynamic
    tree, Σ log q along each node's path.
    """

    tokens: Tensor
    parents: Tensor
    sizes: Tensor
    q: Tensor | None = None
    scores: Tensor | None = None

    @functools.cached_property
    def _above(self) -> list[list[int]]:
        return self.parents.tolist()

    @functools.cached_property
    def rows(self) -> list[tuple[list[int], list[int]]]:
        """Tokens and parents of each row's real nodes."""
        tokens, sizes = self.tokens.tolist(), self.sizes.tolist()
        parents = self._above * (len(sizes) // len(self._above))
        return [(t[:n], above[:n]) for t, above, n in zip(tokens, parents, sizes, strict=True)]

    @property
    def visible(self) -> Tensor:
        """[B or 1, n, n] bool: node i sees node j iff j is i or an ancestor of i."""
        return _ancestors(tuple(map(tuple, self._above)))[0]

    @property
    def depths(self) -> Tensor:
        """[B or 1, n]: number of edges from the root."""
        return _ancestors(tuple(map(tuple, self._above)))[1]


@functools.lru_cache(maxsize=256)
@torch.inference_mode(False)  # what is kept may be used by whoever asks next
def _ancestors(parents: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor]:
    count = len(parents[0])
    visible = np.zeros((len(parents), count, count), dtype=bool)
    for row, tree in enumerate(parents):
        for node, parent in enumerate(tree):
            if parent >= 0:
                visible[row, node] = visible[row, parent]
            visible[row, node, node] = True
    return torch.from_numpy(visible), torch.from_numpy(visible.sum(-1) - 1)


def chain(tokens: Tensor, sizes: Tensor | None = None, q: Tensor | None = None) -> Proposal:
    """Chains [B, n]: every node's parent is the one before it."""
    batch, count = tokens.shape
    full = torch.full((batch,), count, dtype=torch.long)
    return Proposal(tokens, torch.arange(-1, count - 1)[None], full if sizes is None else sizes, q)
