"""The rules at run time, on made-up traffic."""

import random
import time

import pytest

from draftsmith.eval.gate import SpeculationGate, reached


def gate(**changes):
    return SpeculationGate(
        **({"most_temperature": 1.0, "most_batch": 8, "break_even": 0.4, "window": 20, "retry_after": 50} | changes)
    )


def test_hot_requests_and_large_batches_are_refused_and_the_limits_themselves_are_not():
    rules = gate()
    assert rules.should_speculate(1.0, 8)
    assert not rules.should_speculate(1.01, 1)
    assert not rules.should_speculate(0.0, 9)
    assert not gate(most_batch=0).should_speculate(0.0, 1)
    assert not gate(most_temperature=-1.0).should_speculate(0.0, 1)


def test_a_full_window_below_break_even_falls_back_for_so_many_plain_steps_and_then_tries_again():
    rules = gate()
    for _ in range(19):
        rules.observe(1, 5)
        assert rules.should_speculate()
    rules.observe(1, 5)  # the twentieth: the window is full
    assert [rules.should_speculate() for _ in range(51)] == [False] * 50 + [True]
    for _ in range(19):
        rules.observe(0, 5)
        assert rules.should_speculate(), "the new trial has a window of its own"
    rules.observe(0, 5)
    assert not rules.should_speculate()


def test_the_rate_is_of_sums_over_the_window_and_old_verifies_leave_it():
    rules = gate(window=3)
    for accepted, drafted in ((5, 5), (5, 5), (0, 5), (1, 1)):
        rules.observe(accepted, drafted)
    assert rules.acceptance_rate == pytest.approx(6 / 11)
    assert gate().acceptance_rate == 1.0


def test_a_verify_without_drafts_says_nothing_and_impossible_ones_are_refused():
    rules = gate(window=1)
    rules.observe(0, 0)
    assert rules.should_speculate()
    with pytest.raises(ValueError, match="accepted 3 of 2"):
        rules.observe(3, 2)
    with pytest.raises(ValueError, match="window"):
        gate(window=0)


def test_at_break_even_it_goes_on_and_steady_good_traffic_never_falls_back():
    rules = gate(break_even=0.4, window=50)
    rng = random.Random(0)
    for _ in range(2000):
        rules.observe(sum(rng.random() < 0.7 for _ in range(5)), 5)
        assert rules.should_speculate()
    exact = gate(window=5)
    for _ in range(100):
        exact.observe(2, 5)
        assert exact.should_speculate()


@pytest.mark.parametrize(
    ("pays", "start", "found"),
    [
        ((True, True, False), 0.0, 0.5),
        ((True, False, True), 0.0, 0.0),
        ((False, True, True), 0.0, None),
        ((False, True, True), 0.5, 1.0),
        ((True, True, False), 1.0, None),
    ],
)
def test_a_limit_is_the_last_of_those_that_pay_from_the_choice_on_whatever_their_order(pays, start, found):
    entries = [{"temperature": t, "pays": p} for t, p in zip((0.0, 0.5, 1.0), pays, strict=True)]
    assert reached(entries, "temperature", start) == reached(entries[::-1], "temperature", start) == found


def test_a_step_of_the_gate_takes_less_than_fifty_microseconds():
    """About half a microsecond; the bound is what a per-request test may cost."""
    rules = gate(window=1000)
    best = 1.0
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(200):
            rules.observe(3, 5)
            rules.should_speculate(0.5, 4)
        best = min(best, (time.perf_counter() - started) / 200)
    assert best < 50e-6
