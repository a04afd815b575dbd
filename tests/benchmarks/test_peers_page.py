"""The peers' benchmark: its arithmetic and page, on lines made by hand."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "peers"))
from peers_page import best_of, gain, longer_rows, page, parts, study_rows

ABOUT = {"command": "make bench-peers", "intervals": "so", "revisions": ["one"]}
SETTINGS = ("chain T=0", "tree T=0")


def line(what: str, recipe: str, tau: float, rate: float | None = None, seed: int = 0, change: str = ""):
    """A line of runs.jsonl whose every prompt of 100 tokens took 100 / tau verifies."""
    job = {"recipe": recipe, "rate": rate, "seed": seed, "change": change}
    if what == "trained":
        about = {"rollouts": 3, "decay": 1.0, "other_lr": 1e-3}
        return {
            "job": job,
            "what": what,
            "steps": 9,
            "seconds_per_step": 0.5,
            "package": {recipe: "1"},
            "settings": about,
        }
    decoded = {setting: [[100, 100 / tau]] * 4 for setting in SETTINGS}
    return {"job": job, "what": what, "decoded": decoded, "difference": 1e-6}


def lines(ours: float):
    found = [line(what, "ours", ours, seed=seed) for what in ("trained", "final") for seed in range(2)]
    found.append(line("choosing", "ours", ours))
    for peer, default, best in (("a", 1.2, 2.0), ("b", 1.5, 1.8)):
        found += [
            line("trained", peer, 1.0),
            line("choosing", peer, default),
            line("choosing", peer, 9.0, rate=0.1, seed=1),
        ]
        found += [line("choosing", peer, best, rate=0.01), line("final", peer, default)]
        found += [line("final", peer, best, rate=0.01, seed=seed) for seed in range(2)]
    return found


def test_the_rate_that_counts_is_the_best_on_the_prompts_that_choose_at_the_first_seed():
    found = [line("choosing", "a", 1.2), line("choosing", "a", 2.0, rate=0.01), line("final", "a", 9.0, rate=0.5)]
    assert best_of(found, "a")["job"]["rate"] == 0.01


@pytest.mark.parametrize(("ours", "met"), [(2.21, True), (2.19, False)])
def test_the_goal_is_held_against_the_better_peer_at_its_best_rate(ours, met):
    goals = [row for row in study_rows(lines(ours), 1000) if row.get("goal") == ">= 1.1"]
    assert [row["settings"]["decoding"] for row in goals] == list(SETTINGS)
    for row in goals:
        assert (row["settings"]["peer"], row["settings"]["rate"], row["met"]) == ("a", "0.01", met)
        assert row["value"] == pytest.approx(ours / 2.0)


def test_a_gain_is_paired_by_prompt():
    hard_and_easy = [[100, 100.0], [100, 20.0], [100, 50.0], [100, 33.0]]
    slower = [[tokens, 1.2 * verifies] for tokens, verifies in hard_and_easy]
    ours, theirs = ([{"job": {"seed": 0}, "decoded": {"chain": prompts}}] for prompts in (hard_and_easy, slower))
    found = gain(parts(ours, "chain"), parts(theirs, "chain"))
    assert (found["low"], found["high"]) == (pytest.approx(1.2), pytest.approx(1.2))


def test_the_page_says_what_is_missed_and_holds_every_recipe_and_rate():
    entries = [
        *lines(2.1),
        line("final", "ours", 1.7, change="without x"),
        line("trained", "ours", 1.7, change="without x"),
    ]
    later = longer_rows([line("final", "ours", 3.0), line("final", "b", 2.4, rate=0.01)], 9000)
    rows = [*study_rows(entries, 1000), *later]
    text = page({"environment": {"cores": 2}, **ABOUT, "rows": rows})
    assert "| chain T=0 | a, 0.01 | 1.050 | 1.050 – 1.050 | >= 1.1 | **no** |" in text
    assert "| tree T=0 | b, default | 1.400 |" in text
    assert "| b | 0.01 | 2 | 1.800 (1.80–1.80) |" in text
    assert "| ours, without x | default | 1 | 1.700" in text
    assert "On 9,000 tokens" in text
    assert "| tree T=0 | b, 0.01 | 1.250 |" in text
    assert "| ours | 3 | 1 | 0.001 | 9 | 0.50 |" in text
