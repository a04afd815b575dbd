"""How a model drafter's tree grows: level by level, in a fixed shape or by EAGLE-2's expansion and re-ranking (of sampled children:
`draftsmith.eval.sampled`).

Works through two calls of the drafter: the logits after the pending token, and those after a level's nodes. Knows neither which
model drafts nor how it keeps its states.
"""

import functools
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from draftsmith.eval.sampled import grow_sampled
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import Dynamic, Proposal, Shape, Static
from draftsmith.models.vocabulary import DraftVocabulary


class Grower(Protocol):
    """What growth needs of a drafter. Node 0 is the root (the pending token); nodes are numbered per row."""

    vocabulary: DraftVocabulary

    def extend(self, tokens: Tensor, parents: Tensor, visible: Tensor, depth: int) -> Tensor:
        """Draft logits [B, w, V_d] after w further nodes of depth `depth` ≥ 1.

        tokens [B, w]; parents [B, w]: which of the nodes run so far (0: the root, then in the order of the calls) is each one's
        parent; visible [B or 1, w, run so far + w]: which run nodes (the root left out) each one sees.
        """

    def confidence(self) -> Tensor:
        """[B]: the expected acceptance of the next token below the newest node."""


def grow(drafter: Grower, roots: Tensor, logits: Tensor, shape: Shape, sampler: Sampler) -> Proposal:
    """The proposal below `roots` [B] (pending tokens), given the draft logits [B, V_d] after them."""
    if isinstance(shape, Dynamic):
        if sampler.deterministic:
            return _grow_dynamic(drafter, roots, logits, shape)
        return grow_sampled(drafter, roots, logits, shape, sampler)
    return _grow_static(drafter, roots, logits, shape, sampler)


class _Level(NamedTuple):
    """Nodes of one depth that have children, and how the drafter runs them. nodes: their numbers; children: how many each has;
    places [w]: where they are among all nodes drawn at that depth; parents [1, w] and visible [1, w, run]: as `Grower.extend`
    takes them."""

    nodes: tuple[int, ...]
    children: tuple[int, ...]
    places: Tensor
    parents: Tensor
    visible: Tensor


class _Plan(NamedTuple):
    """levels: from the root down; order [n]: where each node is in the order of drawing; parents [1, n]."""

    levels: tuple[_Level, ...]
    order: Tensor
    parents: Tensor


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is kept may be used by whoever asks next
def _plan(shape: Static) -> _Plan:
    """How a shape is drawn: the same for every proposal, so worked out once."""
    levels: list[_Level] = []
    run: list[int] = []  # inner nodes below the root, in the order in which the drafter runs them
    drawn = [[0]]  # nodes of each depth, in the order of drawing
    for depth in range(shape.depth):
        nodes = tuple(i for i in drawn[-1] if shape.children[i])
        if depth:
            parents = [0 if (p := shape.parents[i]) == 0 else run.index(p) + 1 for i in nodes]
            run += nodes
        visible = [[_is_ancestor(shape, j, i) for j in run] for i in nodes]
        levels.append(
            _Level(
                nodes,
                tuple(len(shape.children[i]) for i in nodes),
                torch.tensor([drawn[-1].index(i) for i in nodes]),
                torch.tensor([parents if depth else [-1]]),
                torch.tensor([visible]),
            )
        )
        drawn.append([child for i in nodes for child in shape.children[i]])
    sequence = [node for level in drawn for node in level]
    order = torch.tensor([sequence.index(node) for node in range(len(sequence))])
    return _Plan(tuple(levels), order, torch.tensor([shape.parents]))


def _grow_static(drafter: Grower, roots: Tensor, logits: Tensor, shape: Static, sampler: Sampler) -> Proposal:
    """Only nodes that have children are run; each draws as many children as the shape gives it.

    A chain with `min_confidence` stops before a token whose acceptance the draft expects to be lower. That is decided from the
    tokens before it alone, so the output's law does not change.
    """
    batch, count = len(roots), len(shape.parents)
    levels, order, all_parents = _plan(shape)
    columns = [roots[:, None]]
    q = None
    if not sampler.deterministic:
        q = torch.zeros(batch, count, drafter.vocabulary.target_size, dtype=torch.float64)
    level_logits = logits[:, None]
    going, sizes = torch.ones(batch, dtype=torch.bool), torch.full((batch,), count)
    for depth, level in enumerate(levels):
        if depth:
            tokens = torch.cat(columns[-len(levels[depth - 1].nodes) :], 1)
            if len(level.nodes) < tokens.shape[1]:
                tokens = tokens[:, level.places]
            level_logits = drafter.extend(tokens, level.parents.expand(batch, -1), level.visible, depth)
        if shape.min_confidence:
            sure = drafter.confidence() >= shape.min_confidence
            sizes = torch.where(going & ~sure, depth + 1, sizes)
            going &= sure
            if not bool(going.any()):
                break
            sampler = sampler.only(going.tolist())
        for place, (node, children) in enumerate(zip(level.nodes, level.children, strict=True)):
            drawn, distribution = sampler.draft(level_logits[:, place], children)
            columns.append(drafter.vocabulary.to_target(drawn))
            if q is not None and distribution is not None:
                q[:, node] = drafter.vocabulary.widen(distribution)
    tokens = torch.cat(columns, 1)
    if tokens.shape[1] == count:  # otherwise a chain that stopped early, whose order is that of drawing
        tokens = tokens[:, order]
    used = int(sizes.max()) if shape.min_confidence else count
    return Proposal(tokens[:, :used], all_parents[:, :used], sizes, q if q is None else q[:, :used])


def _is_ancestor(shape: Static, above: int, node: int) -> bool:
    """Whether `above` is `node` or stands on its path to the root."""
    while node > above:
        node = shape.parents[node]
    return node == above


def _grow_dynamic(drafter: Grower, roots: Tensor, logits: Tensor, shape: Dynamic) -> Proposal:
    """EAGLE-2, sections 4.1 and 4.2: expand by the product of confidences along the path, then re-rank all proposed nodes.

    Children are the draft's likeliest tokens: the proposal is deterministic.
    """
    batch, width = len(roots), shape.width
    sharp = 1.0 / shape.confidence_temperature
    scores, ids = (logits * sharp).log_softmax(-1).topk(width, dim=-1)  # a node's score is Σ log q along its path
    pool_tokens, pool_scores = [ids], [scores]
    pool_parents = [torch.zeros(batch, width, dtype=torch.long)]
    pooled = width
    # The level's nodes: places in the pool (numbered from 1; 0 is the root), and what they see of the nodes run so far.
    level = torch.arange(1, width + 1).expand(batch, width)
    visible = torch.eye(width, dtype=torch.bool).expand(batch, width, width)
    run_parents = torch.zeros(batch, width, dtype=torch.long)
    for depth in range(1, shape.depth):
        level_logits = drafter.extend(drafter.vocabulary.to_target(ids), run_parents, visible, depth)
        child_scores, child_ids = (level_logits * sharp).log_softmax(-1).topk(width, dim=-1)
        child_scores = (child_scores + scores[:, :, None]).flatten(1)
        pool_tokens.append(child_ids.flatten(1))
        pool_scores.append(child_scores)
        pool_parents.append(level.repeat_interleave(width, dim=1))
        # The best `width` of the width² candidates are the next level.
        best = child_scores.topk(width, dim=-1)
        scores, ids = best.values, child_ids.flatten(1).gather(1, best.indices)
        parent_place = best.indices // width
        run_parents = (depth - 1) * width + 1 + parent_place
        level = pooled + 1 + best.indices
        pooled += width * width
        above = visible.gather(1, parent_place[:, :, None].expand(-1, -1, visible.shape[2]))
        visible = torch.cat([above, torch.eye(width, dtype=torch.bool).expand(batch, width, width)], dim=2)
    return _rerank(
        drafter, roots, torch.cat(pool_tokens, 1), torch.cat(pool_scores, 1), torch.cat(pool_parents, 1), shape
    )


def _rerank(
    drafter: Grower, roots: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor, shape: Dynamic
) -> Proposal:
    """The `budget` best nodes of the pool. A child never outscores its parent (log q ≤ 0), and on a tie the stable sort keeps
    the shallower node, which stands first in the pool: so every chosen node's parent is chosen, and precedes it."""
    batch = len(roots)
    chosen = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, : shape.budget].sort(-1).values
    place = torch.zeros(batch, tokens.shape[1] + 1, dtype=torch.long)  # pool number → node number
    place.scatter_(1, chosen + 1, torch.arange(1, shape.budget + 1).expand(batch, -1))
    new_parents = place.gather(1, parents.gather(1, chosen))
    root = torch.full((batch, 1), -1)
    return Proposal(
        torch.cat([roots[:, None], drafter.vocabulary.to_target(tokens.gather(1, chosen))], dim=1),
        torch.cat([root, new_parents], dim=1),
        torch.full((batch,), shape.budget + 1),
        scores=torch.cat([scores.new_zeros(batch, 1), scores.gather(1, chosen)], dim=1),
    )
