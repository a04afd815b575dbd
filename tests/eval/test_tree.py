"""Tree shapes, masks and growth, against brute force."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import tiny_target

from draftsmith.errors import UserError
from draftsmith.eval.decode import _prefill
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
    """A draft LM and an EAGLE head. The fresh head hardly attends to other slots, so its weights are moved: here a wrong mask
    must show."""
    vocabulary = DraftVocabulary(torch.arange(0, target.vocabulary, 2), target.vocabulary)
    head = new_eagle_head(target, (0, 1, 2), vocabulary)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "q_proj" in name or "k_proj" in name:
                parameter.copy_(0.3 * noise)
            else:
                parameter.add_(0.1 * noise)
    return {"draft LM": LMDrafter(DraftLM.from_target_blocks(target, [0, 3])), "EAGLE-3": EagleDrafter(head)}


def begin(drafter, target, prompts):
    """The drafter at its first proposal, and what it is given for it."""
    drafter.begin(len(prompts), 128)
    return _prefill(target, drafter, target.new_cache(len(prompts), 64), prompts)


class Forced(Sampler):
    """Drafts given draft ids [B][K] and remembers the logits that it was offered."""

    def force(self, tokens):
        self.tokens, self.seen = tokens, []
        return self

    def draft(self, logits, count=1):
        self.seen.append(logits)
        return torch.tensor([[row[len(self.seen) - 1]] for row in self.tokens]), None


def chain_logits(drafter, target, prompts, paths):
    """Draft logits after each path of target tokens, drafted alone as a chain below its prompt."""
    longest = max(map(len, paths)) + 1
    ids = [drafter.vocabulary.to_draft(torch.tensor([*path, *[0] * (longest - len(path))])).tolist() for path in paths]
    sampler = Forced(0.0).force(ids)
    drafter.propose(begin(drafter, target, prompts), chain_shape(longest), sampler)
    return torch.stack([sampler.seen[len(path)][row] for row, path in enumerate(paths)])


def grow_and_compare(drafter, target, prompts, shape, monkeypatch, change_mask=lambda visible: visible):
    """The tree that grows when `change_mask` is applied to each level's mask. Its logits after every node that was run must
    be those of drafting the node's branch alone."""
    whose, paths, found, run = [], [], [], [[()] for _ in prompts]
    extend = drafter.extend

    def watched(tokens, parents, visible, depth):
        logits = extend(tokens, parents, change_mask(visible), depth)
        for row, (ids, above) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
            level = [(*run[row][parent], token) for token, parent in zip(ids, above, strict=True)]
            run[row] += level
            whose.extend([prompts[row]] * len(level))
            paths.extend(level)
            found.extend(logits[row])
        return logits

    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(drafter, "extend", watched)
            tree = drafter.propose(begin(drafter, target, prompts), shape, Sampler(0.0))
        assert max(map(len, paths)) == shape.depth - 1
        torch.testing.assert_close(torch.stack(found), chain_logits(drafter, target, whose, paths), atol=1e-4, rtol=0)
    return tree


GROWN = {"static": level_shape([2, 2, 1]), "dynamic": Dynamic(3, 3, 9)}
PROMPTS = [[7, 8, 9, 10, 11], [20, 21, 22]]


@pytest.mark.parametrize("which", ["draft LM", "EAGLE-3"])
@pytest.mark.parametrize("shape", sorted(GROWN))
def test_a_branch_of_a_grown_tree_is_what_a_chain_would_draft(shape, which, monkeypatch):
    target = tiny_target()
    tree = grow_and_compare(drafters(target)[which], target, PROMPTS, GROWN[shape], monkeypatch)
    assert tree.tokens.shape == (2, GROWN[shape].nodes + 1)


@pytest.mark.parametrize("which", ["draft LM", "EAGLE-3"])
@pytest.mark.parametrize("shape", sorted(GROWN))
def test_a_mask_that_shows_every_node_to_every_node_would_be_seen(shape, which, monkeypatch):
    """The control of the test above, without which it could be blind."""
    target = tiny_target()
    with pytest.raises(AssertionError, match="not close"):
        grow_and_compare(drafters(target)[which], target, PROMPTS, GROWN[shape], monkeypatch, torch.ones_like)


def test_the_static_tree_holds_the_likeliest_tokens_after_each_node():
    target = tiny_target()
    shape = GROWN["static"]
    for drafter in drafters(target).values():
        with torch.no_grad():
            tokens = drafter.propose(begin(drafter, target, PROMPTS[:1]), shape, Sampler(0.0)).tokens[0].tolist()
            inner = [node for node in range(len(tokens)) if shape.children[node]]
            paths = [[tokens[i] for i in sorted(ancestors(shape.parents, node))[1:]] for node in inner]
            logits = chain_logits(drafter, target, PROMPTS[:1] * len(inner), paths)
        for node, after in zip(inner, logits, strict=True):
            best = drafter.vocabulary.to_target(after.topk(len(shape.children[node])).indices).tolist()
            assert [tokens[child] for child in shape.children[node]] == best


@pytest.mark.parametrize("which", ["draft LM", "EAGLE-3"])
def test_the_dynamic_tree_equals_expanding_and_reranking_by_brute_force(which, monkeypatch):
    """EAGLE-2 over whole paths, each scored by drafting it alone."""
    target = tiny_target()
    drafter = drafters(target)[which]
    shape = Dynamic(3, 3, 14)  # levels 1 and 2 hold 12 nodes: some of level 3 must be chosen
    with torch.no_grad():
        level, pool = [((), 0.0)], []
        for _ in range(shape.depth):
            candidates = []
            q = chain_logits(drafter, target, PROMPTS[:1] * len(level), [path for path, _ in level]).log_softmax(-1)
            for (path, score), after in zip(level, q, strict=True):
                values, ids = after.topk(shape.width)
                tokens = drafter.vocabulary.to_target(ids).tolist()
                candidates += [((*path, t), score + float(v)) for t, v in zip(tokens, values, strict=True)]
            pool += candidates
            level = sorted(candidates, key=lambda found: -found[1])[: shape.width]
        wanted = {path for path, _ in sorted(pool, key=lambda found: -found[1])[: shape.budget]}
    tree = grow_and_compare(drafter, target, PROMPTS[:1], shape, monkeypatch)
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()

    def path_of(node):
        return () if node == 0 else (*path_of(parents[node]), tokens[node])

    assert {path_of(node) for node in range(1, shape.budget + 1)} == wanted
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
