"""The EAGLE study's comparisons and page, on lines made by hand."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from eagle_claims import CLAIMS, MEASURES, study_rows
from eagle_heads import ROWS, WITH_TREE, K
from eagle_page import ADVICE, page

ABOUT = {"command": "make study-eagle", "intervals": "so", "revisions": ["one", "two"]}
DOMAINS = ("code", "prose", "chat")


def line(row: str, seed: int, alpha: float, tree: float, with_tree: bool = True):
    """A line of runs.jsonl: `alpha` at every step on four rows of 100 positions, `tree` tokens per verify with either shape."""
    forced = {kind: [[100 * alpha] * K + [100] * K] * 4 for kind in ("0", "1", "ceiling")}
    shapes = ("chain", "tree") if with_tree else ("chain",)
    sums = {"chain": [10 * tree, 10, 5, 10, *[5] * K, *[10] * K], "tree": [10 * tree, 10, 5, 10]}
    return {
        "job": {"row": row, "settings": json.dumps({"tokens": 1000}), "seed": seed},
        "parameters": 7,
        "forced": {domain: dict(forced) for domain in DOMAINS},
        "decoded": {domain: {f"{name} {t}": [sums[name]] * 4 for name in shapes for t in "01"} for domain in DOMAINS},
        "seconds": [30.0, 60.0],
    }


def entries(eagle3: float, seeds: int = 3):
    found = [line("eagle1", seed, 0.4, 2.0) for seed in range(3)]
    found += [line("eagle3", seed, 0.5, eagle3) for seed in range(seeds)]
    found += [line("eagle3, no rollouts", seed, 0.45, 1.5, with_tree=False) for seed in range(2)]
    return [*found, line("tuning: eagle1, matrix_lr 0.02", 1000, 0.4, 2.0)]


@pytest.mark.parametrize(("eagle3", "met"), [(2.5, True), (2.3, False)])
def test_the_goal_is_eagle3_over_eagle1_in_tokens_per_verify_with_the_same_tree(eagle3, met):
    goals = [row for row in study_rows(entries(eagle3), workers=2) if row["what"] == "claim" and "goal" in row]
    assert [row["settings"]["sides"][0][1] for row in goals] == ["tree, T = 0", "tree, T = 1"]
    for row in goals:
        assert row["value"] == row["low"] == row["high"] == pytest.approx(eagle3 / 2)
        assert (row["goal"], row["met"]) == (">= 1.2", met)


def test_a_claim_is_compared_over_common_seeds_and_its_verdict_is_what_the_interval_says():
    rows = [row for row in study_rows(entries(2.5), workers=2) if row["what"] == "claim"]
    found = {row["settings"]["sides"][0][1]: row for row in rows if row["settings"]["sides"][1][0].endswith("rollouts")}
    assert found["1-alpha, T = 1"]["value"] == pytest.approx(5.0)  # points
    assert found["chain, T = 0"]["value"] == pytest.approx(2.5 / 1.5)  # a ratio
    assert {row["seeds"] for row in found.values()} == {2}
    assert {row["settings"]["verdict"] for row in found.values()} == {
        "the first is better"
    }  # no paper says it of our start
    worse = [row for row in study_rows(entries(1.0), workers=2) if row["what"] == "claim"]
    verdicts = {row["settings"]["verdict"] for row in worse if row["settings"]["unit"] == "ratio"}
    assert verdicts == {
        "the other way",
        "the second is better",
        "no difference shown",
    }  # trees here add nothing to chains


def test_one_seed_is_no_verdict_and_no_advice():
    rows = study_rows(entries(2.5, seeds=1), workers=2)
    assert {row["settings"]["verdict"] for row in rows if row["what"] == "claim" and row["seeds"] == 1} == {
        "one seed: not judged"
    }
    assert "take `kind: eagle3`" not in page({"environment": {"cores": 2}, **ABOUT, "rows": rows})


def test_a_study_that_was_cut_short_yields_a_page_that_says_what_it_has():
    rows = study_rows(entries(2.5), workers=2)
    text = page({"environment": {"cores": 2}, **ABOUT, "rows": rows})
    assert "| tree, T = 0 | 2.50 | 2.00 | 1.25 × (1.25 to 1.25) | >= 1.2 | yes |" in text
    assert "1.67 × (1.67 to 1.67) | the first is better (2 seeds) |" in text
    assert "7 comparisons are judged: where no two heads differed, about 0 would" in text
    assert "trained and measured: one, two." in text
    assert "| eagle3, no rollouts | 2 | 30 | 1.50 (1.50–1.50)" in text
    assert "a head sees 1,000 tokens" in text
    assert "9 heads, 4 minutes on 2 idle cores" in text
    assert "**train with `rollouts` above 1**" in text
    assert "Medusa" not in text.split("## The papers' claims")[1].split("## All heads")[0]


def test_every_claim_and_every_advice_names_heads_that_the_study_trains_and_measures_them_where_they_are_measured():
    for claim in CLAIMS:
        for row, measure in (side for sides in claim.sides for side in sides):
            assert row in ROWS
            assert measure in MEASURES
            assert not measure.startswith("tree") or row in WITH_TREE
    pairs = {(claim.first, claim.second) for claim in CLAIMS}
    assert {advice[:2] for advice in ADVICE} <= pairs
    compared = {row for pair in pairs for row in pair}
    assert compared == set(ROWS)
