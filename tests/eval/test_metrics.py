"""The metric definitions on a trace made by hand (FAULTS 58)."""

import pytest

from draftsmith.eval.decode import Verify
from draftsmith.eval.metrics import metrics


def step(accepted, K=5, emitted=None):
    hits = (True,) * accepted + ((False,) if accepted < K else ())
    return Verify(K, accepted, accepted + 1 if emitted is None else emitted, tuple(map(float, hits)), hits)


def values(intervals):
    return [interval["value"] for interval in intervals]


def test_the_worked_example_of_the_design():
    result = metrics([[step(3), step(0)], [step(2), step(5)]], K=5)
    assert result["acceptance_rate"]["value"] == 0.50
    assert result["tokens_per_verify"]["value"] == 3.50
    assert values(result["survival"]) == [0.75, 0.75, 0.50, 0.25, 0.25]
    assert values(result["n_alpha"]) == pytest.approx([0.75, 1, 2 / 3, 0.50, 1])
    assert (result["verifies"], result["tokens"], result["acceptance_rate"]["count"]) == (4, 14, 20)


def test_alpha_counts_only_positions_that_were_reached():
    result = metrics([[step(3), step(0)]], K=5)
    assert result["alpha"] == {"value": 3 / 5, "low": 3 / 5, "high": 3 / 5, "count": 5}


def test_a_step_cut_by_eos_counts_what_was_emitted():
    cut = Verify(5, 3, 3, (1.0, 1.0, 1.0), (True, True, True))
    result = metrics([[cut]], K=5)
    assert result["tokens_per_verify"]["value"] == 3
    assert result["n_alpha"][3] == {}  # beyond the cut nothing was reached


def test_intervals_cover_the_value_and_shrink_with_prompts():
    def spread(n):
        interval = metrics([[step(a) for a in (0, 5, 2)] if i % 2 else [step(1), step(4)] for i in range(n)], K=5)[
            "alpha"
        ]
        assert interval["low"] <= interval["value"] <= interval["high"]
        return interval["high"] - interval["low"]

    assert 0 < spread(200) < spread(8)
