"""The SmolLM2 study: its arithmetic and page, on lines made by hand."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from smollm2_page import GAIN, HEADS, SETTINGS, TOLD, page, study_rows

RECIPES = {head: dict.fromkeys(TOLD) for head in HEADS}


def line(head: str, tau: float, seed: int, same: int = 8):
    """A line of runs.jsonl whose every prompt of 60 tokens took 60 / tau verifies."""
    decoded = {domain: {setting: [[60, 60 / tau]] * 4 for setting in SETTINGS} for domain in ("code", "chat")}
    return {
        "job": {"head": head, "tokens": 100, "seed": seed},
        "parameters": 12,
        "steps": 3,
        "decoded": decoded,
        "equal": {"tree": [same, 8], "chain": [8, 8]},
        "seconds": [5.0, 9.0],
    }


def gains(entries):
    return [row for row in study_rows(entries, RECIPES) if row["what"] == GAIN]


@pytest.mark.parametrize(("tau", "met"), [(1.5, True), (1.45, True), (1.4, False)])
def test_the_goal_is_held_against_the_tree_over_all_texts_alone(tau, met):
    rows = gains([line("eagle1", 1.2, 0), line("eagle3", tau, 0)])
    goals = [row for row in rows if "goal" in row]
    assert [(row["settings"]["decoding"], row["settings"]["domain"]) for row in goals] == [
        ("tree 0", "all"),
        ("tree 1", "all"),
    ]
    for row in rows:
        assert row["value"] == pytest.approx(tau / 1.2)
    assert [row["met"] for row in goals] == [met, met]


def test_seeds_that_one_head_lacks_are_not_compared():
    rows = gains([line("eagle1", 1.0, 0), line("eagle1", 9.0, 1), line("eagle3", 2.0, 0)])
    assert {row["value"] for row in rows} == {2.0}
    assert {row["settings"]["seeds"] for row in rows} == {1}


def test_the_page_says_which_goal_is_missed_and_how_many_texts_are_equal():
    rows = study_rows([line("eagle1", 1.2, 0, same=7), line("eagle3", 1.3, 0)], RECIPES)
    text = page({"rows": rows, "command": "make study-smollm2", "environment": {"cores": 2}})
    assert text.count("**no**") == 2
    assert "31 of 32 texts" in text
    assert "the same 100 tokens" in text.replace("\n", " ")
