"""The check of the first token's law: right rules pass it, a planted wrong rule does not."""

import numpy as np
import pytest
from kit import tiny_target

from draftsmith.eval import rules
from draftsmith.eval.drafters import LMDrafter
from draftsmith.eval.exactness import _mean_deviation, first_token_law
from draftsmith.eval.sampling import Sampler, draw
from draftsmith.models.draft import DraftLM

PROMPT, DRAWS = [7, 20, 31, 9], 4000


def law_of(sampler):
    target = tiny_target()
    drafter = LMDrafter(DraftLM.from_target_blocks(target, [0]))
    return first_token_law(target, drafter, PROMPT, sampler, DRAWS)


@pytest.mark.parametrize("sampler", [Sampler(1.0), Sampler(1.0, top_k=20)])
def test_the_decoder_emits_p_up_to_the_noise_of_sampling(sampler):
    """KL of n draws from p is χ² / 2n: with 149 outcomes it exceeds 1.5 times its mean about once in 10⁵ runs; TV likewise."""
    law = law_of(sampler)
    assert law.kl < 1.5 * law.kl_expected + 0.005
    assert law.tv < 1.3 * law.tv_expected


def test_a_rule_without_the_residual_is_caught(monkeypatch):
    def biased(tokens, parents, p, q, stream):
        accepted = stream.random() * q[0][tokens[1]] < p[0][tokens[1]]
        path = [0, 1] if accepted else [0]
        return rules.Accepted(path, draw(p[path[-1]], stream.random()), [1.0])  # draws from p, not from (p − q)₊

    monkeypatch.setattr(rules, "rejection", biased)
    law = law_of(Sampler(1.0))
    assert law.tv > 1.5 * law.tv_expected


def test_the_expected_distance_of_rare_and_of_frequent_outcomes_is_that_of_simulated_shares():
    """The normal approximation is three times too large at np = 0.03."""
    p, draws = np.array([3e-4, 0.01, 0.4, 0.5897, 0.0]), 100
    shares = np.random.default_rng(0).binomial(draws, p, (40_000, 5)) / draws
    np.testing.assert_allclose(_mean_deviation(p, draws), np.abs(shares - p).mean(0), rtol=0.06, atol=1e-12)
