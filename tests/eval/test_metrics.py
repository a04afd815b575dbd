"""The metric definitions on a trace made by hand (FAULTS 58)."""

import numpy as np
import pytest

from draftsmith.eval.decode import Verify
from draftsmith.eval.metrics import by_position, by_prompt_length, metrics, paired_ratio, ratio


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


def test_alpha_by_depth_is_of_the_acceptance_probabilities_reached_at_that_depth():
    steps = [Verify(2, 1, 2, (0.9, 0.2), (True, False)), Verify(2, 0, 1, (0.5,), (False,))]
    found = metrics([steps], K=2)
    assert values(found["alpha_by_depth"]) == pytest.approx([0.7, 0.2])
    assert [entry["count"] for entry in found["alpha_by_depth"]] == [2, 1]
    assert found["alpha"]["value"] == pytest.approx(1.6 / 3)


def test_a_verify_belongs_to_the_place_in_the_answer_where_it_begins():
    """Five verifies of four tokens begin at 0, 4, 8, 12, 16: the last one alone is beyond 16."""
    found = by_position([[[step(3)] * 4 + [step(1)]], [[step(0)]]])
    assert [(b["from"], b["to"], b["prompts"]) for b in found] == [(0, 16, 2), (16, 32, 1)]
    assert [b["tokens_per_verify"]["value"] for b in found] == [17 / 5, 2]
    assert [b["alpha"]["value"] for b in found] == [12 / 17, 1 / 2]


def test_a_second_answer_begins_at_its_own_first_token():
    found = by_position([[[step(3)] * 5, [step(0)]]])
    assert [(b["from"], b["tokens_per_verify"]["count"]) for b in found] == [(0, 5), (16, 1)]


def test_prompts_are_sorted_by_their_length_and_the_last_bucket_has_no_end():
    found = by_prompt_length([[[step(3)]], [[step(0)]], [[step(5)]]], [[31], [32], [1 << 20]])
    assert [(b["from"], b["to"]) for b in found] == [(0, 32), (32, 64), (32768, None)]
    assert [b["tokens_per_verify"]["value"] for b in found] == [4, 1, 6]


def test_the_sums_of_each_prompt_give_every_metric_again():
    traces = [[step(3), step(0)], [step(2), step(5), Verify(5, 1, 1, (0.4,), (True,))]]
    found = metrics(traces, K=5)
    sums = {name: np.array(column, dtype=float) for name, column in found["per_prompt"].items()}
    assert ratio(sums["tokens"], sums["verifies"]) == found["tokens_per_verify"]
    assert ratio(sums["accepted"], sums["drafted"]) == found["acceptance_rate"]
    assert ratio(sums["overlap_at"].sum(1), sums["reached"].sum(1)) == found["alpha"]
    for k in range(5):
        assert ratio(sums["accepted_at"][:, k], sums["reached"][:, k]) == found["n_alpha"][k]
        assert ratio(sums["survived"][:, k], sums["verifies"]) == found["survival"][k]


def test_a_paired_ratio_covers_texts_and_rounds_and_not_what_disturbs_both_sides_of_a_round():
    same = paired_ratio(np.full((4, 3), 2.0), np.full((4, 3), 1.0))
    assert (same["value"], same["low"], same["high"]) == (2.0, 2.0, 2.0)
    texts = paired_ratio(np.array([[1.0], [9.0]]), np.array([[2.0], [2.0]]))
    assert texts["low"] < texts["value"] == 2.5 < texts["high"]
    rounds = paired_ratio(np.full((2, 3), 2.0), np.array([[1.0, 2.0, 4.0]] * 2))
    assert rounds["low"] < rounds["value"] == 1.0 < rounds["high"]
    disturbed = paired_ratio(np.array([[2.0, 20.0]] * 3), np.array([[1.0, 10.0]] * 3))
    assert (disturbed["value"], disturbed["low"], disturbed["high"]) == (2.0, 2.0, 2.0)
