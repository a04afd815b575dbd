"""The comparison with an engine and its table, on counts made by hand: equal sides agree, and no fault of an export goes by."""

import sys
from pathlib import Path

import pytest
from kit import tiny_target

from draftsmith.eval.drafters import LMDrafter, NoDraft

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from serving import OurDecoder
from serving_compare import Side, compare, paired
from serving_page import study_rows, table, write_table

STEPS = [[[3, 3], [3, 1], [3, 0]], [[3, 2], [3, 2]], [[3, 0], [3, 3], [3, 3]], [[3, 1], [3, 2], [3, 1]]] * 3
TOKENS = [[7, prompt, 9] for prompt in range(len(STEPS))]
ABOUT = {"draft": "eagle3", "layout": "vllm", "method": "eagle3", "K": 3, "spoilt": ""}


def fewer(steps):
    """The same verifies with nothing accepted after the first position, as off-by-one taps leave it."""
    return [[[drafted, min(accepted, 1)] for drafted, accepted in prompt] for prompt in steps]


def test_our_side_begins_behind_the_first_new_token_and_counts_the_last_verify_whole():
    """A perfect draft of 3 tokens: four a verify behind the first one, and all of the last verify's, though the cap cuts it."""
    target = tiny_target()
    decoder = OurDecoder(target, [[9, 8, 7], [20, 21, 22, 23]], new_tokens=12)
    plain = [decoded.tokens for decoded in decoder.plain]
    side = decoder.side(LMDrafter(target), 3)
    assert side.tokens == plain
    assert side.steps == [[[3, 3]] * -(-(len(tokens) - 1) // 4) for tokens in plain]
    assert max(map(len, plain)) == 12
    nothing = decoder.side(NoDraft(), 3)
    assert (nothing.tokens, nothing.steps) == (plain, [[], []]), "a verify without a draft is none"


def test_equal_sides_agree_and_count_as_vllm_counts():
    found = compare(Side(TOKENS, STEPS), Side(TOKENS, STEPS), K=3)
    assert found["faults"] == []
    assert found["identical"] == [12, 12]
    assert found["equal_verifies"] == [33, 33]
    assert found["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert found["theirs"]["drafts"] == 33
    assert found["theirs"]["length"]["value"] == pytest.approx(1 + 18 / 11)
    assert [rate["value"] for rate in found["theirs"]["positions"]] == pytest.approx([9 / 11, 6 / 11, 3 / 11])


def test_one_differing_token_is_a_fault_although_as_much_was_accepted():
    other = [[7, 99, 9], *TOKENS[1:]]
    faults = compare(Side(TOKENS, STEPS), Side(other, STEPS), K=3)["faults"]
    assert faults == ["greedy tokens of 1 prompts differ"]


def test_lower_acceptance_is_a_fault_although_the_tokens_are_equal():
    found = compare(Side(TOKENS, STEPS), Side(TOKENS, fewer(STEPS)), K=3)
    assert any("acceptance length differs by -0.8" in fault for fault in found["faults"])
    assert [fault.split(" differs")[0] for fault in found["faults"][1:]] == [
        "acceptance rate at position 2",
        "acceptance rate at position 3",
    ]
    assert found["difference"]["high"] < 0


def test_positions_that_cancel_out_in_the_length_are_faults_still():
    ours = Side(TOKENS, [[[2, 1], [2, 1]]] * 12)
    theirs = Side(TOKENS, [[[2, 2], [2, 0]]] * 12)
    found = compare(ours, theirs, K=2)
    assert found["difference"]["value"] == 0
    assert len(found["faults"]) == 2


def test_one_verify_that_rounding_decided_otherwise_is_within_the_interval():
    theirs = [[[3, 3], [3, 1], [3, 1]], *STEPS[1:]]
    found = compare(Side(TOKENS, STEPS), Side(TOKENS, theirs), K=3)
    assert found["faults"] == []
    assert found["equal_verifies"] == [32, 33]


def test_an_engine_that_never_drafts_does_not_agree():
    nothing = Side(TOKENS, [[] for _ in TOKENS])
    assert compare(Side(TOKENS, STEPS), nothing, K=3)["faults"] == ["drafts: 33 of ours, 0 of theirs"]
    assert compare(nothing, nothing, K=3)["faults"] == ["drafts: 0 of ours, 0 of theirs"]


def test_prompts_that_went_missing_are_an_error_and_no_agreement():
    with pytest.raises(ValueError, match="12 prompts of ours, 11 of theirs"):
        compare(Side(TOKENS, STEPS), Side(TOKENS[1:], STEPS[1:]), K=3)


def test_the_paired_interval_is_far_narrower_than_either_sides():
    ours, theirs = Side(TOKENS, STEPS), Side(TOKENS, [[[3, 3], [3, 2], [3, 0]], *STEPS[1:]])
    difference = paired(ours, theirs, lambda step: step[1])
    length = compare(ours, ours, K=3)["ours"]["length"]
    assert difference["high"] - difference["low"] < 0.5 * (length["high"] - length["low"])


def test_a_spoilt_export_is_as_it_must_be_only_if_it_was_found_out_with_less_accepted():
    good = compare(Side(TOKENS, STEPS), Side(TOKENS, STEPS), K=3)
    bad = compare(Side(TOKENS, STEPS), Side(TOKENS, fewer(STEPS)), K=3)
    more = compare(Side(TOKENS, fewer(STEPS)), Side(TOKENS, STEPS), K=3)
    barely = compare(Side(TOKENS, STEPS), Side(TOKENS, [[[3, 2], *STEPS[0][1:]], *STEPS[1:]]), K=3)
    assert barely["difference"]["value"] < 0
    refused = {"faults": ["refused: no such file"]}
    spoilt = ABOUT | {"spoilt": "taps off by one"}
    entries = [ABOUT | good, ABOUT | bad, spoilt | bad, spoilt | good, spoilt | more, spoilt | barely]
    entries += [spoilt | refused, ABOUT | refused]
    assert [row["met"] for row in study_rows(entries)] == [True, False, True, False, False, False, False, False]


def test_the_table_stands_between_its_marks_and_holds_every_case(tmp_path):
    page = tmp_path / "serving.md"
    page.write_text("before\n<!-- parity -->\nold\n<!-- end of parity -->\nafter\n", encoding="utf-8")
    good = compare(Side(TOKENS, STEPS), Side(TOKENS, STEPS), K=3)
    bad = compare(Side(TOKENS, STEPS), Side(TOKENS, fewer(STEPS)), K=3)
    rows = study_rows([ABOUT | good, ABOUT | {"spoilt": "taps off by one"} | bad, ABOUT | {"faults": ["refused: why"]}])
    write_table(rows, page)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- parity -->\n")
    assert text.endswith("<!-- end of parity -->\nafter\n")
    assert "old" not in text
    assert "| 12/12 | 2.636 (" in text
    assert "0.818, 0.545, 0.273" in text
    assert "refused: why" in text
    assert table(rows).count("| yes |") == 1
