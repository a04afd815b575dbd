"""The acceptance rules as pure functions: closed forms, and the law of what they emit."""

import numpy as np
import pytest

from draftsmith.eval import rules
from draftsmith.eval.sampling import draw

P = np.array([0.5, 0.5, 0.0])
Q = np.array([0.9, 0.05, 0.05])


def law_of_first_token(tokens_of, parents, p, q, draws, seed=0):
    """Frequencies [V] of the first emitted token when `tokens_of(rng)` drafts the tree."""
    rng = np.random.default_rng(seed)
    counts = np.zeros(p.shape[1])
    for _ in range(draws):
        tokens = tokens_of(rng)
        accepted = rules.rejection(tokens, parents, p, q, rng)
        counts[tokens[accepted.path[1]] if len(accepted.path) > 1 else accepted.following] += 1
    return counts / draws


def test_after_the_rejection_of_token_0_the_residual_leaves_only_token_1():
    """FAULTS 56: (p − q)₊ = (0, .45, 0)."""
    rng = np.random.default_rng(0)
    rejected = 0
    for _ in range(400):
        accepted = rules.rejection([9, 0], [-1, 0], np.stack([P, P]), np.stack([Q, Q]), rng)
        if len(accepted.path) == 1:
            rejected += 1
            assert accepted.following == 1
    assert 120 < rejected < 240  # 1 − .5/.9 = .44 of 400; five standard deviations are 50


def test_overlap_is_the_sum_of_the_smaller_probabilities():
    accepted = rules.rejection([9, 0], [-1, 0], np.stack([P, P]), np.stack([Q, Q]), np.random.default_rng(0))
    assert accepted.overlaps == [pytest.approx(0.55)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_chain_emits_the_targets_law_whatever_the_draft(deterministic):
    """χ² with 3 degrees of freedom at 20,000 draws; false-alarm rate 1e-4 (21.1)."""
    p = np.tile([0.1, 0.2, 0.3, 0.4], (2, 1))
    q = np.tile([0.4, 0.4, 0.1, 0.1], (2, 1))

    def tokens(rng):
        return [9, 1 if deterministic else draw(q[0], rng.random())]

    observed = law_of_first_token(tokens, [-1, 0], p, None if deterministic else q, 20_000)
    assert 20_000 * ((observed - p[0]) ** 2 / p[0]).sum() < 21.1


def test_siblings_drawn_without_replacement_emit_the_targets_law():
    """Three siblings: q is renormalised after each rejection, else token 0 is emitted too often. False-alarm rate 1e-4."""
    p = np.tile([0.1, 0.2, 0.3, 0.4], (4, 1))
    q = np.tile([0.55, 0.25, 0.15, 0.05], (4, 1))

    def tokens(rng):
        return [9, *rng.choice(4, size=3, replace=False, p=q[0])]

    observed = law_of_first_token(tokens, [-1, 0, 0, 0], p, q, 20_000)
    assert 20_000 * ((observed - p[0]) ** 2 / p[0]).sum() < 21.1


def test_greedy_follows_the_longest_branch_that_agrees():
    #        root 5 ── 1 ── 3
    #              └── 2 ── 4 ── 6
    tokens, parents = [5, 1, 2, 3, 4, 6], [-1, 0, 0, 1, 2, 4]
    accepted = rules.greedy(tokens, parents, best=[2, 0, 4, 0, 7, 0])
    assert (accepted.path, accepted.following) == ([0, 2, 4], 7)
    assert accepted.overlaps == [1.0, 1.0, 0.0]


def test_full_acceptance_ends_with_a_bonus_from_the_target():
    one_hot = np.eye(3)
    p = np.stack([one_hot[1], one_hot[2], one_hot[0]])
    accepted = rules.rejection([9, 1, 2], [-1, 0, 1], p, p, np.random.default_rng(0))
    assert (accepted.path, accepted.following) == ([0, 1, 2], 0)
