"""The distillation study's arithmetic and page, on lines made by hand."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from distill_page import page, study_rows


def line(loss: str, seed: int, alpha: float, size: str = "two blocks", tokens: int = 1000):
    """A line of runs.jsonl whose teacher-forced α is `alpha` on every one of four rows of 100 positions."""
    forced = {kind: [[100 * alpha, 100]] * 4 for kind in ("0", "1", "1 sure", "1 unsure")}
    decoded = {kind: [[5 * alpha, 10, 20, 10]] * 4 for kind in ("0", "1")}
    return {
        "job": {"loss": loss, "size": size, "teacher": "top-k 64", "seed": seed, "tokens": tokens},
        "parameters": 7,
        "forced": dict.fromkeys(("code", "prose", "chat"), forced),
        "decoded": dict.fromkeys(("code", "prose", "chat"), decoded),
    }


def entries(default: float):
    found = [line("untrained", 0, 0.3, tokens=0)]
    for seed in range(3):
        found += [line("forward_kl", seed, default), line("cross_entropy", seed, 0.5), line("reverse_kl", seed, 0.45)]
    return found


@pytest.mark.parametrize(("default", "met"), [(0.56, True), (0.54, False)])
def test_the_goal_is_points_of_alpha_over_hard_cross_entropy_on_code(default, met):
    rows = study_rows(entries(default), ("forward_kl", "top-k 64"), "top-k 64", 1000)
    [goal] = [row for row in rows if "goal" in row]
    assert goal["value"] == pytest.approx(100 * (default - 0.5))
    assert (goal["goal"], goal["met"], goal["settings"]["domain"]) == (">= 5.0", met, "code")
    start = next(row for row in rows if "untrained start" in row["what"])
    assert start["value"] == pytest.approx(100 * (default - 0.3))


def test_the_page_holds_the_rows_numbers_and_says_what_is_missed_and_what_is_slower():
    speed = {"value": 0.7, "low": 0.6, "high": 0.8, "count": 4}
    about = {"domain": "code", "temperature": 1.5, "drafting": "greedy"}
    slow = {"what": "failure mode: speed-up, demo target", **speed, "settings": about}
    rows = [*study_rows(entries(0.54), ("forward_kl", "top-k 64"), "top-k 64", 1000), slow]
    text = page({"environment": {"cores": 2}, "command": "make study-distill", "intervals": "so", "rows": rows})
    assert "| 4.0 | 4.0 – 4.0 | >= 5.0 | **no** |" in text
    assert "Slower than plain decoding in 1 of 1 settings" in text
    assert "| two blocks | untrained | 0 | 0.30" in text
    assert "| greedy | 1.5 | 0.70 (0.60–0.80) |" in text
    assert "No other loss and no other teacher is better" in text
