"""The studies' intervals: what they cover, and what is paired with what."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from bootstrap import gain, points, pooled, ratio_row, sums

TEXTS = 24


def drawn(rng: np.random.Generator, texts: np.ndarray, seeds: int, spread: float, value: float = 0.6):
    """Sums of `seeds` seeds on texts of these differences, each seed with a difference of its own."""
    shared = np.full(TEXTS, 100.0)
    return {
        seed: np.stack([100 * (value + texts + rng.normal(0, spread) + rng.normal(0, 0.002, TEXTS)), shared], -1)
        for seed in range(seeds)
    }


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_heads_that_differ_by_their_seeds_alone_are_told_apart_as_rarely_as_the_interval_says(seeds):
    rng, found = np.random.default_rng(0), []
    for _ in range(250):
        texts = rng.normal(0, 0.05, TEXTS)
        row = points(drawn(rng, texts, seeds, 0.02), drawn(rng, texts, seeds, 0.02))
        found.append(row["low"] > 0 or row["high"] < 0)
    assert np.mean(found) < 0.09  # 0.05; of a bootstrap over seeds 0.5, 0.25 and 0.12


def test_the_interval_holds_the_spread_of_texts_too():
    rng, found = np.random.default_rng(1), []
    for _ in range(250):
        row = ratio_row(drawn(rng, rng.normal(0, 0.05, TEXTS), 3, 0.0))
        found.append(not row["low"] <= 0.6 <= row["high"])
    assert 0.02 < np.mean(found) < 0.1


def test_sides_are_paired_by_text_and_by_seed():
    rng = np.random.default_rng(2)
    texts = rng.normal(0, 0.1, TEXTS)
    one = drawn(rng, texts, 3, 0.1)
    better = {seed: parts * [1.3, 1.0] for seed, parts in reversed(one.items())}  # in another order
    row = gain(better, one)
    assert row["low"] == pytest.approx(row["high"]) == pytest.approx(1.3)
    other = gain({(seed + 1) % 3: parts for seed, parts in better.items()}, one)
    assert other["high"] - other["low"] > 0.5
    shuffled = gain({seed: rng.permutation(parts) for seed, parts in better.items()}, one)
    assert shuffled["high"] - shuffled["low"] > 0.05


def test_a_seed_that_one_side_lacks_is_left_out_of_both():
    rng = np.random.default_rng(3)
    one = drawn(rng, rng.normal(0, 0.1, TEXTS), 3, 0.1)
    better = {seed: parts * [1.3, 1.0] for seed, parts in one.items()}
    row = gain(better, {seed: one[seed] for seed in (0, 2)})
    assert row["value"] == pytest.approx(row["low"]) == pytest.approx(1.3)
    assert row["seeds"] == 2
    with pytest.raises(ValueError, match="none in common"):
        gain({0: one[0]}, {1: one[1]})


def test_sums_are_pooled_and_what_was_never_counted_is_left_out():
    found = {0: np.array([[1.0, 2.0], [0.0, 0.0]]), 1: np.array([[3.0, 4.0], [0.0, 0.0]])}
    assert pooled(found).value == pytest.approx(4 / 6)
    assert np.isfinite([ratio_row(found)[key] for key in ("low", "high")]).all()
    assert ratio_row({0: found[0]})["seeds"] == 1
    row = ratio_row(found | {2: np.zeros((2, 2))})  # a seed whose chains never got there
    assert (row["value"], row["seeds"]) == (pytest.approx(4 / 6), 2)
    assert np.isfinite([row["low"], row["high"]]).all()


def test_the_sums_of_lines_stand_under_their_seeds_whatever_their_order():
    lines = [{"job": {"seed": seed}, "decoded": {"code": {"tree": [[seed, 1, 9]]}}} for seed in (2, 0)]
    found = sums(lines, "all", "decoded", "tree", (0, 1))
    assert {seed: parts.tolist() for seed, parts in found.items()} == {2: [[2, 1]], 0: [[0, 1]]}
    assert sums([], "all", "decoded", "tree", (0, 1)) == {}
