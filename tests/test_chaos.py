"""A small part of `make chaos`, and that its judgement is strict: what must be survived may not end in a refusal."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from chaos import Campaign, finished, outcome
from chaos_page import KINDS, MAY_STOP, section, study_rows
from chaos_run import Ended

DONE, KILLED, REFUSED = (
    Ended(0, ""),
    Ended(-9, ""),
    Ended(2, "draftsmith: damaged; run `draftsmith cache-repair CONFIG`"),
)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    made = Campaign(tmp_path_factory.mktemp("chaos"), ("target", "prepare", "cache", "distill"), ranks=False)
    made.prepare()
    return made


@pytest.mark.parametrize(
    ("kind", "stage"),
    [("kill", "target"), ("kill", "distill"), ("tracker", "distill"), ("flip", "cache"), ("full disk", "prepare")],
)
def test_a_fault_is_survived_or_where_that_is_enough_stopped_in_one_line(
    campaign: Campaign, kind: str, stage: str
) -> None:
    fault = campaign.inject(kind, stage, random.Random(f"{kind} {stage}"))
    allowed = {"survived", "stopped"} if kind in MAY_STOP else {"survived"}
    assert fault["outcome"] in allowed, json.dumps(fault)
    assert fault["lost"] == []


def test_a_result_other_than_the_reference_is_a_failure_that_names_it(campaign: Campaign) -> None:
    wanted = campaign.wanted["prepare", False]
    campaign.wanted["prepare", False] = wanted | {"rows/train/token_ids.npy": "of other tokens"}
    try:
        fault = campaign.inject("slow disk", "prepare", random.Random(0))
    finally:
        campaign.wanted["prepare", False] = wanted
    assert (fault["outcome"], fault["lost"]) == ("failed", ["rows/train/token_ids.npy"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ends", "stopped", "lost", "expected"),
    [
        ([DONE], False, False, "survived"),
        ([KILLED, DONE], False, False, "survived"),
        ([KILLED, DONE], False, True, "failed"),
        ([REFUSED, DONE, DONE], True, False, "stopped or failed"),
        ([REFUSED, DONE, DONE], True, True, "failed"),
        ([REFUSED, DONE, REFUSED], True, False, "failed"),
        ([Ended(1, "Traceback")], False, False, "failed"),
        ([Ended(None, "")], False, False, "failed"),
        ([Ended(143, "no word of why"), DONE], False, False, "failed"),
    ],
)
def test_only_kinds_that_the_user_has_to_know_of_may_be_refused(
    kind: str, ends: list[Ended], stopped: bool, lost: bool, expected: str
) -> None:
    if expected == "stopped or failed":
        expected = "stopped" if kind in MAY_STOP else "failed"
    assert outcome(kind, ends, stopped, lost) == expected


def test_faults_of_other_code_do_not_count_as_done(tmp_path: Path) -> None:
    lines = [
        {"number": 2, "code": "this"},
        {"number": 0, "code": "other"},
        {"number": 1},
        {"number": 0, "code": "this"},
    ]
    (journal := tmp_path / "chaos.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [fault["number"] for fault in finished(journal, "this")] == [0, 2]


def faults(**change: Any) -> list[dict[str, Any]]:
    made = [{"kind": kind, "stage": "cache", "outcome": "survived", "lost": []} for kind in KINDS]
    made[0] |= change
    return made


def test_the_study_counts_by_kind_and_its_goals_are_missed_by_one_failure_one_loss_or_one_fault_too_few() -> None:
    assert all(row["met"] for row in study_rows(faults(), 8))
    assert not study_rows(faults(), 9)[-2]["met"]
    failed = {row["what"]: row for row in study_rows(faults(outcome="failed", lost=["rows/a"]), 8)}
    assert [name for name, row in failed.items() if not row["met"]] == [
        "kill",
        "survived or stopped cleanly",
        "data lost",
    ]
    assert (failed["kill"]["value"], failed["kill"]["count"], failed["kill"]["failed"]) == (0, 1, 1)
    assert not study_rows(faults(outcome="stopped"), 8)[0]["met"]
    assert "8 of 9 faults have run so far" in section(faults(), 9, "a tmpfs")
