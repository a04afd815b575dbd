"""Acceptance rules: which drafted tokens stay, and which token follows them. Pure functions of one row's tree, p, q and rng.

All but `typical` are lossless: the emitted tokens follow p exactly, whatever the drafter proposes. Knows nothing of models or
caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from draftsmith.eval.sampling import draw


@dataclass
class Accepted:
    """path: node numbers from the root down, the root included; following: the token emitted after the last of them.

    overlaps: for each drafted position that was reached, the probability that it is accepted given its context: Σ_v min(p, q) for
    one sampled token, the target's mass on the candidates for deterministic ones; what happened (0 or 1) when greedy and for
    several sampled tokens.
    """

    path: list[int]
    following: int = -1
    overlaps: list[float] = field(default_factory=list)


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """Children of each node, in the order in which they were drafted."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    return children


def greedy(tokens: Sequence[int], parents: Sequence[int], best: Sequence[int]) -> Accepted:
    """Follow the target's own choice through the tree for as long as it was drafted.

    tokens, parents: the tree's nodes, the root first; best[i]: the target's likeliest token after node i.
    """
    children, result = children_of(parents), Accepted([0])
    node: int | None = 0
    while node is not None:
        result.following = best[node]
        match = next((child for child in children[node] if tokens[child] == best[node]), None)
        if children[node]:
            result.overlaps.append(float(match is not None))
        if match is not None:
            result.path.append(match)
        node = match
    return result


def rejection(
    tokens: Sequence[int], parents: Sequence[int], p: np.ndarray, q: np.ndarray | None, rng: np.random.Generator
) -> Accepted:
    """Speculative sampling (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023), for chains and, recursively, for trees.

    p [n, V]: the target's distribution after each node. q [n, V]: the distribution from which the children of each node were
    drawn, without replacement if there are several; None for a deterministic proposal, where each child is a point mass.
    """
    children, result = children_of(parents), Accepted([0])
    node = 0
    while True:
        residual = p[node]
        proposal = None if q is None or not children[node] else q[node]
        if children[node]:
            mass = residual[[tokens[c] for c in children[node]]].sum()
            result.overlaps.append(float(mass if proposal is None else np.minimum(residual, proposal).sum()))
        accepted = None
        for child in children[node]:
            x = tokens[child]
            # Accept x with probability min(1, p(x) / q(x)); a point mass has q(x) = 1.
            if rng.random() * (1.0 if proposal is None else proposal[x]) < residual[x]:
                accepted = child
                break
            # Rejected: what remains of the target is (p − q)₊ / ‖(p − q)₊‖₁ …
            remaining = residual.copy()
            if proposal is None:
                remaining[x] = 0.0
            else:
                remaining = np.maximum(remaining - proposal, 0.0)
                # … and the next sibling was drawn from q without x.
                proposal = proposal.copy()
                proposal[x] = 0.0
                proposal /= max(proposal.sum(), np.finfo(float).tiny)
            residual = remaining / remaining.sum()
        if proposal is not None and len(children[node]) > 1:
            result.overlaps[-1] = float(accepted is not None)
        if accepted is None:
            # All siblings rejected: the residual. No siblings at all (the end of the path): the target itself, a bonus token.
            result.following = draw(residual, rng.random())
            return result
        result.path.append(accepted)
        node = accepted


def typical(
    tokens: Sequence[int], parents: Sequence[int], p: np.ndarray, epsilon: float, delta: float, rng: np.random.Generator
) -> Accepted:
    """Medusa's typical acceptance (arXiv 2401.10774, section 3.3.1). LOSSY: what is emitted does not follow p.

    A drafted token x stays if p(x) > min(ε, δ · exp(−H(p))); of all paths of such tokens the longest is taken, and on a tie the
    likeliest; the token after it is drawn from p.
    """
    children = children_of(parents)
    entropy = -(p * np.log(np.maximum(p, np.finfo(float).tiny))).sum(-1)
    threshold = np.minimum(epsilon, delta * np.exp(-entropy))
    best: tuple[int, float, list[int]] = (0, 0.0, [0])
    stack: list[tuple[float, list[int]]] = [(0.0, [0])]
    while stack:
        score, path = stack.pop()
        best = max(best, (len(path) - 1, score, path), key=lambda found: found[:2])
        node = path[-1]
        for child in children[node]:
            likelihood = p[node][tokens[child]]
            if likelihood > threshold[node]:
                stack.append((score + float(np.log(likelihood)), [*path, child]))
    path = best[2]
    overlaps = [float(p[node][tokens[child]]) for node, child in pairwise(path)]
    if children[path[-1]]:
        overlaps.append(0.0)
    return Accepted(path, draw(p[path[-1]], rng.random()), overlaps)
