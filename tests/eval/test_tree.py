"""Tree shapes, masks and growth, against brute force."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import tiny_target

from draftsmith.errors import UserError
from draftsmith.eval.drafters import EagleDrafter, LMDrafter
from draftsmith.eval.growth import grow
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import Dynamic, Proposal, Static, chain_shape, level_shape, optimal_shape, shape_from_paths
from draftsmith.models.draft import DraftLM
from draftsmith.models.eagle import new_eagle_head
from draftsmith.models.vocabulary import DraftVocabulary


@st.composite
def parent_lists(draw, largest=12):
    """Any tree: each node hangs below any earlier one."""
    count = draw(st.integers(2, largest))
    return [-1, *(draw(st.integers(0, i - 1)) for i in range(1, count))]


def ancestors(parents, node):
    return {node} | (ancestors(parents, parents[node]) if parents[node] >= 0 else set())


@settings(max_examples=60, deadline=None)
@given(parent_lists())
def test_mask_and_depths_equal_brute_force_for_any_tree(parents):
    proposal = Proposal(torch.zeros(1, len(parents)), torch.tensor([parents]), torch.tensor([len(parents)]))
    for i in range(len(parents)):
        above = ancestors(parents, i)
        assert [j for j in range(len(parents)) if proposal.visible[0, i, j]] == sorted(above)
        assert proposal.depths[0, i] == len(above) - 1 == Static(tuple(parents)).depths[i]


def test_named_shapes():
    assert chain_shape(3).parents == (-1, 0, 1, 2)
    assert level_shape([2, 2]).parents == (-1, 0, 0, 1, 1, 2, 2)
    assert shape_from_paths([[0], [1], [0, 0], [0, 1], [0, 0, 0]]).parents == (-1, 0, 0, 1, 1, 3)
    assert level_shape([3, 3]).nodes == 12


@pytest.mark.parametrize(
    "make",
    [
        lambda: chain_shape(0),
        lambda: Static((-1, 1)),
        lambda: Static((-1,)),
        lambda: Static((0, 0)),
        lambda: shape_from_paths([[1]]),
        lambda: shape_from_paths([[0, 0]]),
        lambda: Dynamic(2, 2, 7),
        lambda: Dynamic(0, 1, 1),
    ],
)
def test_impossible_trees_are_refused(make):
    with pytest.raises(UserError):
        make()


def expected_accepted(paths, profile):
    return sum(math.prod(profile[d][r] for d, r in enumerate(path)) for path in paths)


def test_the_optimal_tree_is_as_good_as_any_tree_of_its_size():
    profile = [[0.6, 0.25, 0.1], [0.5, 0.3, 0.1], [0.7, 0.1, 0.05]]
    every = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]

    def closed(chosen):
        return all((len(p) == 1 or p[:-1] in chosen) and (p[-1] == 0 or (*p[:-1], p[-1] - 1) in chosen) for p in chosen)

    for budget in range(1, 6):
        best = max(expected_accepted(c, profile) for c in itertools.combinations(every, budget) if closed(set(c)))
        shape = optimal_shape(profile, budget)
        paths = []
        for node in range(1, budget + 1):
            path, at = [], node
            while at:
                path.insert(0, shape.children[shape.parents[at]].index(at))
                at = shape.parents[at]
            paths.append(path)
        assert expected_accepted(paths, profile) == pytest.approx(best)


def drafters(target):
    vocabulary = DraftVocabulary(torch.arange(0, target.vocabulary, 2), target.vocabulary)
    head = new_eagle_head(target, (0, 1, 2), vocabulary)
    with torch.no_grad():
        head.lm_head.weight.mul_(3.0)
    return [LMDrafter(DraftLM.from_target_blocks(target, [0, 3])), EagleDrafter(head)]


def begin(drafter, target, prompts):
    """The drafter after its first proposal (a chain of one), so that its state of the prompts stands; and what it was given."""
    from draftsmith.eval.decode import _prefill

    drafter.begin(len(prompts), 128)
    cache = target.new_cache(len(prompts), 64)
    return _prefill(target, drafter, cache, prompts)


@pytest.mark.parametrize("which", [0, 1])
def test_a_branch_of_a_grown_tree_is_what_a_chain_would_draft(which):
    """Static growth: along any branch, the drafter's logits equal those of drafting that branch alone."""
    target = tiny_target()
    prompts = [[7, 8, 9, 10, 11], [20, 21, 22]]
    drafter = drafters(target)[which]
    with torch.no_grad():
        committed = begin(drafter, target, prompts)
        tree = drafter.propose(committed, level_shape([2, 2, 1]), Sampler(0.0))
        shape = level_shape([2, 2, 1])
        for row in range(2):
            for leaf in range(7, 11):
                path = sorted(ancestors(shape.parents, leaf))
                wanted = [int(tree.tokens[row, node]) for node in path[1:]]

                class Forced(Sampler):
                    def draft(self, logits, count=1, wanted=wanted, row=row):
                        top = drafter.vocabulary.to_target(logits.topk(2, -1).indices)[row].tolist()
                        assert wanted[self.at] in top[: 2 if self.at < 2 else 1]
                        token = int(drafter.vocabulary.to_draft(torch.tensor(wanted[self.at])))
                        self.at += 1
                        return [[token]] * len(logits), None

                sampler = Forced(0.0)
                sampler.at = 0
                drafter.propose(begin(drafter, target, prompts), chain_shape(3), sampler)
                assert sampler.at == 3


@pytest.mark.parametrize("which", [0, 1])
def test_the_dynamic_tree_equals_expanding_and_reranking_by_brute_force(which):
    """EAGLE-2 by recursion over whole paths, each scored by drafting it alone."""
    target = tiny_target()
    prompt = [7, 8, 9, 10, 11]
    drafter = drafters(target)[which]
    width, depth, budget = 3, 3, 9

    def log_q(path):
        """log q after a path of target tokens, by feeding it as a chain."""
        seen = []

        class Forced(Sampler):
            def draft(self, logits, count=1):
                seen.append(logits)
                place = len(seen) - 1
                token = int(drafter.vocabulary.to_draft(torch.tensor(path[place]))) if place < len(path) else 0
                return [[token]], None

        drafter.propose(begin(drafter, target, [prompt]), chain_shape(len(path) + 1), Forced(0.0))
        return seen[len(path)][0].log_softmax(-1)

    with torch.no_grad():
        level, pool = [((), 0.0)], []
        for _ in range(depth):
            candidates = []
            for path, score in level:
                values, ids = log_q(list(path)).topk(width)
                tokens = drafter.vocabulary.to_target(ids).tolist()
                candidates += [((*path, t), score + float(v)) for t, v in zip(tokens, values, strict=True)]
            pool += candidates
            level = sorted(candidates, key=lambda found: -found[1])[:width]
        wanted = {path for path, _ in sorted(pool, key=lambda found: -found[1])[:budget]}
        tree = drafter.propose(begin(drafter, target, [prompt]), Dynamic(width, depth, budget), Sampler(0.0))
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()

    def path_of(node):
        return () if node == 0 else (*path_of(parents[node]), tokens[node])

    assert {path_of(node) for node in range(1, budget + 1)} == wanted
    assert all(parent < node for node, parent in enumerate(parents))


def test_ties_prefer_the_shallower_node():
    """With equal scores a child may not displace its parent or a shallower node."""

    class Certain:
        vocabulary = DraftVocabulary.all_of(4)

        def extend(self, tokens, parents, visible, depth):
            return torch.tensor([0.0, -1e9, -1e9, -1e9]).expand(*tokens.shape, 4)

    logits = torch.tensor([[0.0, -1e9, -1e9, -1e9]])
    tree = grow(Certain(), torch.tensor([1]), logits, Dynamic(2, 3, 3), Sampler(0.0))
    assert tree.parents[0].tolist() == [-1, 0, 1, 2]
