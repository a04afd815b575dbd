"""The SmolLM2 study: its arithmetic and page, on lines made by hand."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from smollm2_page import GAIN, SETTINGS, page, study_rows

from draftsmith.train.settings import EagleTrainSettings

ABOUT = {"command": "make study-smollm2", "intervals": "so", "revisions": ["one"]}


def line(head: str, tau: float, seed: int = 0):
    """A line of runs.jsonl whose every prompt of 60 tokens took 60 / tau verifies."""
    recipe = EagleTrainSettings(tokens=100, rollouts=1, draft_vocabulary=None if head == "eagle1" else 512)
    return {
        "job": {"head": head, "settings": recipe.model_dump_json(), "seed": seed},
        "parameters": 1200,
        "steps": 3,
        "decoded": {domain: {setting: [[60, 60 / tau]] * 4 for setting in SETTINGS} for domain in ("code", "chat")},
        "seconds": [5.0, 9.0],
    }


@pytest.mark.parametrize(("tau", "met"), [(1.5, True), (1.45, True), (1.4, False)])
def test_the_goal_is_held_against_the_tree_over_all_texts_alone(tau, met):
    rows = [row for row in study_rows([line("eagle1", 1.2), line("eagle3", tau)]) if row["what"] == GAIN]
    goals = [row for row in rows if "goal" in row]
    assert [(row["settings"]["decoding"], row["settings"]["domain"]) for row in goals] == [
        ("tree 0", "all"),
        ("tree 1", "all"),
    ]
    for row in rows:
        assert row["value"] == pytest.approx(tau / 1.2)
    assert [row["met"] for row in goals] == [met, met]


def test_seeds_are_put_together_as_sums():
    entries = [line("eagle1", 1.0, 0), line("eagle1", 1.0, 1), line("eagle3", 2.0, 0), line("eagle3", 3.0, 1)]
    row = next(row for row in study_rows(entries) if row["what"] == GAIN)
    assert row["value"] == pytest.approx(120 / (30 + 20))
    assert row["seeds"] == 2


def test_a_study_that_was_cut_short_compares_what_is_done():
    alone = study_rows([line("eagle3", 2.0)])
    assert not [row for row in alone if row["what"] == GAIN]
    rows = study_rows([line("eagle1", 1.0, 2), *(line("eagle3", 1.0 + seed, seed) for seed in range(3))])
    assert next(row for row in rows if row["what"] == GAIN)["value"] == pytest.approx(3.0)  # the seed that both have


def test_the_page_says_which_goal_is_missed_and_what_each_head_is():
    rows = study_rows([line("eagle1", 1.2), line("eagle3", 1.3), line("eagle3-plain", 1.1)])
    text = page({"rows": json.loads(json.dumps(rows)), "environment": {"cores": 2}, **ABOUT})
    assert text.count("**no**") == 2
    assert "the same 100 tokens" in text.replace("\n", " ")
    assert "| tree, T = 0 | code | 1.20 (1.20–1.20) | 1.30 (1.30–1.30) | 1.10 (1.10–1.10) |" in text
    assert "| eagle1 | 1 | 0.0 | False | False | all |" in text
    assert "| eagle3 | 1 | 0.0 | False | False | 512 |" in text


def test_ours_is_compared_with_eagle1_from_the_same_start_too_and_that_holds_no_goal():
    rows = study_rows([line("eagle1", 1.2), line("eagle3", 1.5), line("eagle1-from-states", 1.6)])
    row = next(row for row in rows if row["what"] == GAIN and row["settings"]["over"] == "eagle1-from-states")
    assert row["settings"]["head"] == "eagle3"
    assert row["value"] == pytest.approx(1.5 / 1.6)
    assert "goal" not in row
