"""The formulas of `draftsmith.eval.theory` against worked values, simulation and brute force."""

import random

import pytest

from draftsmith.eval.theory import expected_tokens, optimal_length, speedup


def test_alpha_point_eight_and_four_drafted_tokens_give_3_36_tokens_per_verify() -> None:
    assert expected_tokens(0.8, 4) == pytest.approx(3.3616)


@pytest.mark.parametrize(("alpha", "K", "tokens"), [(0.0, 5, 1.0), (1.0, 5, 6.0), (0.5, 2, 1.75), (0.9, 0, 1.0)])
def test_expected_tokens_at_its_corners(alpha: float, K: int, tokens: float) -> None:
    assert expected_tokens(alpha, K) == pytest.approx(tokens, abs=1e-15)


def test_expected_tokens_equals_the_closed_form_and_is_smooth_up_to_alpha_one() -> None:
    for alpha in (0.1, 0.5, 0.9, 0.999):
        for K in range(9):
            assert expected_tokens(alpha, K) == pytest.approx((1 - alpha ** (K + 1)) / (1 - alpha), rel=1e-12)
    assert expected_tokens(1 - 1e-12, 7) == pytest.approx(8.0, abs=1e-9)


def test_expected_tokens_equals_a_simulated_chain() -> None:
    """50 000 verifies: the standard error is below 0.009, so 0.04 is passed falsely less than once in 100 000 runs."""
    rng, total, verifies = random.Random(0), 0, 50_000
    for _ in range(verifies):
        accepted = 0
        while accepted < 4 and rng.random() < 0.7:
            accepted += 1
        total += accepted + 1
    assert total / verifies == pytest.approx(expected_tokens(0.7, 4), abs=0.04)


def test_speedup_divides_the_tokens_by_the_measured_costs() -> None:
    assert speedup(0.8, 4, c=0.1) == pytest.approx(3.3616 / 1.4)
    assert speedup(0.8, 4, c=0.1, verify_cost=1.5) == pytest.approx(3.3616 / 1.9)
    assert speedup(0.8, 0, c=0.1) == 1.0


@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.9])
def test_no_other_length_beats_the_optimum(alpha: float) -> None:
    best = optimal_length(alpha, c=0.05)
    gains = {K: (1 - alpha ** (K + 1)) / (1 - alpha) / (1 + 0.05 * K) for K in range(65)}
    assert gains[best] == max(gains.values())
    assert 0 < best < 64


def test_the_optimum_grows_with_alpha_and_is_zero_for_a_draft_that_cannot_pay() -> None:
    assert [optimal_length(alpha, c=0.05) for alpha in (0.5, 0.7, 0.9)] == [3, 6, 13]
    assert optimal_length(0.3, c=0.5) == 0


@pytest.mark.parametrize(("alpha", "K"), [(1.2, 3), (-0.1, 3), (0.5, -1)])
def test_values_that_are_no_probability_or_count_are_refused(alpha: float, K: int) -> None:
    with pytest.raises(ValueError, match=r"alpha|K"):
        expected_tokens(alpha, K)


def test_costs_that_no_machine_has_are_refused() -> None:
    with pytest.raises(ValueError, match="cost"):
        speedup(0.5, 3, c=-0.1)
