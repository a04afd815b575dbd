"""The tuning study's rows and page, on a document made by hand."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from tune import rows_of
from tune_page import page


def span(value):
    return {"value": value, "low": value - 0.1, "high": value + 0.1, "count": 6}


SETTING = {"draft": "head", "tree": "chain of 4", "drafting": "greedy"}


def document(tokens_error, speed_error):
    predicted = SETTING | {"speedup_predicted": span(1.7), "tokens_per_verify": span(2.5)}
    return {
        "temperature": 0.0,
        "verified": [
            SETTING
            | {"prompts": 6, "measured_tokens_per_verify": span(2.34), "tokens_per_verify_error": tokens_error}
            | {"speedup": span(1.56), "speedup_error": speed_error}
        ],
        "temperatures": [{"temperature": 0.5, "greedy": predicted} | predicted],
        "batches": [{"batch": 4, "best": predicted} | predicted],
    }


@pytest.mark.parametrize(
    ("tokens_error", "speed_error", "met"),
    [(0.0, -0.05, [True, True]), (0.031, 0.1, [False, True]), (-0.031, -0.101, [False, False])],
)
def test_the_goals_are_three_percent_of_tokens_and_ten_of_speed_on_either_side(tokens_error, speed_error, met):
    rows = rows_of("heavy twin", document(tokens_error, speed_error))
    assert [row["met"] for row in rows if "goal" in row] == met
    assert [row["goal"] for row in rows if "goal" in row] == ["within 3%", "within 10%"]
    text = page(rows, ["the verdict"], {"cores": 2})
    assert ("**-10.1%**" in text) == (not met[1])


def test_the_page_shows_every_number_with_its_setting():
    text = page(rows_of("heavy twin", document(0.01, 0.02)), ["the verdict"], {"processor": "slow one", "packages": {}})
    assert "- heavy twin, T = 0: the verdict" in text
    assert (
        "| heavy twin | 0.0 | head | chain of 4 | greedy | 2.34 (2.24 to 2.44) | +1.0% | 1.56 (1.46 to 1.66) | +2.0% |"
        in text
    )
    assert "| heavy twin | head | 0.5 | greedy | chain of 4 | 1.70 (1.60 to 1.80) |" in text
    assert "| heavy twin | 0.0 | 4 | head | chain of 4 | 1.70 (1.60 to 1.80) |" in text
    assert "processor slow one" in text
