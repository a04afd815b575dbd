"""Trees of sampled children: every draw is decided on before it is made, and a tree that drops what it drew is caught."""

import numpy as np
import pytest
import torch
from kit import tiny_target
from law import FALSE_ALARM, enumerated_law, five_token_target, observed_counts, p_value

from draftsmith.eval import growth, sampled
from draftsmith.eval.decode import Decoding, decode
from draftsmith.eval.drafters import LMDrafter
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import Dynamic, Proposal
from draftsmith.models.draft import DraftLM
from draftsmith.models.vocabulary import DraftVocabulary

SHAPE = Dynamic(2, 3, 5)


def reranked(drafter, roots, logits, shape, sampler):
    """EAGLE-2's re-ranking of sampled nodes, which is wrong: twice as many are drawn, and those of the largest q along their path
    stay."""
    tree = sampled.grow_sampled(drafter, roots, logits, Dynamic(shape.width, shape.depth, 2 * shape.budget), sampler)
    rows = []
    for index, (tokens, parents) in enumerate(tree.rows):
        scores = [1.0]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            scores.append(scores[parent] * float(tree.q[index, parent, token]))
        order = sorted(range(len(tokens)), key=lambda node, scores=scores: (-scores[node], node))
        rows.append(sorted(order[: shape.budget + 1]))
    count = max(map(len, rows))
    new_tokens = torch.zeros(len(rows), count, dtype=torch.long)
    new_parents = torch.zeros(len(rows), count, dtype=torch.long)
    q = torch.zeros(len(rows), count, tree.q.shape[2], dtype=torch.float64)
    for index, kept in enumerate(rows):
        for place, node in enumerate(kept):
            new_tokens[index, place] = tree.tokens[index, node]
            new_parents[index, place] = kept.index(int(tree.parents[index, node])) if node else -1
            q[index, place] = tree.q[index, node]
    return Proposal(new_tokens, new_parents, torch.tensor([len(kept) for kept in rows]), q)


@pytest.mark.parametrize("how", ["as it is", "re-ranked after drawing"])
def test_dropping_drawn_nodes_by_their_q_is_caught_and_deciding_before_drawing_is_not(how, monkeypatch):
    target, sampler = five_token_target(), Sampler(1.0)
    if how != "as it is":
        monkeypatch.setattr(growth, "grow_sampled", reranked)
    drafter = LMDrafter(DraftLM.from_target_blocks(target, [0, 3]))
    counts = observed_counts(target, drafter, SHAPE, sampler, 2500, seed=3)
    assert counts.sum() == 2500
    assert (p_value(counts, enumerated_law(target, sampler)) > FALSE_ALARM) == (how == "as it is")


class Fixed:
    """Draft logits that depend on nothing."""

    vocabulary = DraftVocabulary.all_of(6)

    def __init__(self, q):
        self.logits = torch.tensor(q).log()
        self.run = []

    def extend(self, tokens, parents, visible, depth):
        self.run.append((tokens, parents, visible, depth))
        return self.logits.expand(*tokens.shape, len(self.logits))


def grow(q, shape, seed=0, batch=1):
    drafter, sampler = Fixed(q), Sampler(1.0)
    sampler.start(seed, list(range(batch)))
    roots = torch.arange(batch)
    return drafter, sampled.grow_sampled(drafter, roots, drafter.logits.expand(batch, -1), shape, sampler)


def test_a_tree_has_its_budget_its_depth_and_distinct_siblings_drawn_before_their_juniors_children():
    shape = Dynamic(3, 4, 12)
    for seed in range(20):
        _, tree = grow([0.4, 0.3, 0.1, 0.1, 0.05, 0.05], shape, seed, batch=3)
        assert tree.sizes.tolist() == [13, 13, 13]
        for tokens, parents in tree.rows:
            assert all(parent < node for node, parent in enumerate(parents))
            assert len(set(zip(parents, tokens, strict=True))) == len(tokens)
        assert int(tree.depths.max()) <= 4


def test_a_sure_draft_is_drawn_as_a_chain_and_an_unsure_one_as_a_bush():
    shape = Dynamic(4, 4, 8)
    _, sure = grow([0.995, 0.001, 0.001, 0.001, 0.001, 0.001], shape)
    _, unsure = grow([1 / 6] * 6, shape)
    assert sure.parents[0, :5].tolist() == [-1, 0, 1, 2, 3]
    assert unsure.parents[0, :3].tolist() == [-1, 0, 0]


def test_a_draft_with_fewer_tokens_than_nodes_gives_a_smaller_tree():
    drafter, tree = grow([0.5, 0.5, 0, 0, 0, 0], Dynamic(4, 1, 4))
    assert tree.sizes.tolist() == [3]
    assert drafter.run == []


def test_what_the_drafter_runs_sees_its_ancestors_alone():
    for seed in range(5):
        drafter, _ = grow([0.3, 0.3, 0.1, 0.1, 0.1, 0.1], Dynamic(3, 4, 14), seed, batch=2)
        paths = [[()] for _ in range(2)]
        for tokens, parents, visible, depth in drafter.run:
            for row in range(2):
                for place, (token, parent) in enumerate(zip(tokens[row].tolist(), parents[row].tolist(), strict=True)):
                    own = len(paths[row]) - 1
                    above = paths[row][parent]
                    seen = [node for node, on in enumerate(visible[row, place].tolist()) if on]
                    assert len(above) + 1 == depth
                    assert seen == sorted([*above, own])
                    paths[row].append((*above, own))
                    assert 0 <= token < 6


def test_trees_of_sampled_children_do_not_depend_on_the_batch():
    target = tiny_target()
    drafter = LMDrafter(DraftLM.from_target_blocks(target, [0, 1, 2]))
    rng = np.random.default_rng(1)
    texts = [rng.integers(6, 100, n).tolist() for n in (4, 9, 6)]
    how = Decoding(Dynamic(3, 4, 12), Sampler(0.9), 12, eos_ids=frozenset())
    together = decode(target, drafter, texts, how)
    alone = [decode(target, drafter, [text], how, names=[i])[0] for i, text in enumerate(texts)]
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    steps = [
        [[(v.drafted, v.accepted, v.emitted, v.hits, v.ranks) for v in r.trace] for r in out]
        for out in (together, alone)
    ]
    assert steps[0] == steps[1]
