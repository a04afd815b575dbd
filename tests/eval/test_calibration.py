"""How sure a head is: watched token by token without changing what it drafts, and set against what was accepted."""

import itertools

import pytest
from kit import a_head, tiny_target

from draftsmith.eval.calibration import WatchedDrafter, calibration, watched
from draftsmith.eval.decode import Decoded, Decoding, Verify, decode
from draftsmith.eval.drafters import EagleDrafter, NoDraft
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import chain_shape

PROMPTS = [[6, 7, 8, 9], [10, 11], [12, 13, 14]]


def decoded_by(target, drafter, floor=0.0):
    return decode(
        target,
        drafter,
        PROMPTS,
        Decoding(shape=chain_shape(3, floor), sampler=Sampler(1.0), max_new_tokens=9, eos_ids=frozenset()),
    )


def test_each_drafted_token_has_the_confidence_by_which_drafting_would_have_stopped_before_it():
    """The first verifies of two runs, without and with a floor: the second drafts as long as the first was at least so sure."""
    target = tiny_target()
    head = a_head(target, confidence=True)
    free, floored = WatchedDrafter(head), WatchedDrafter(head)
    decoded_by(target, free)
    first = [verifies[0] for verifies in free.seen]
    assert [len(sure) for sure in first] == [3, 3, 3]
    assert len({value for sure in first for value in sure}) == 9
    floor = sorted(value for sure in first for value in sure)[3]
    decoded_by(target, floored, floor)
    lengths = [len(list(itertools.takewhile(lambda value: value >= floor, sure))) for sure in first]
    assert [len(verifies[0]) for verifies in floored.seen] == lengths
    assert len(set(lengths)) > 1


def test_watching_changes_no_token_and_follows_prompts_that_end_early():
    target = tiny_target()
    head = a_head(target, confidence=True)
    drafter = WatchedDrafter(head)
    results, plain = decoded_by(target, drafter), decoded_by(target, EagleDrafter(head))
    assert [result.tokens for result in results] == [result.tokens for result in plain]
    assert [[len(sure) for sure in seen] for seen in drafter.seen] == [[v.drafted for v in r.trace] for r in results]
    assert len({len(result.trace) for result in results}) > 1, "some end before others"


def test_confidence_is_set_against_the_acceptance_of_the_positions_that_were_reached():
    target = tiny_target()
    drafter = watched(EagleDrafter(a_head(target, confidence=True)))
    assert isinstance(drafter, WatchedDrafter)
    verify = Verify(3, 1, 2, (0.8, 0.1), (True, False))  # the third token was never reached
    drafter.seen = [[[0.72, 0.15, 0.9]], [[0.78, 0.12, 0.9]]]
    bins = calibration(drafter, [Decoded([1], [2, 3], trace=[verify]), Decoded([1], [2, 3], trace=[verify])])
    assert [item["confidence"] for item in bins] == pytest.approx([0.135, 0.75])
    assert [item["accepted"]["value"] for item in bins] == pytest.approx([0.1, 0.8])
    assert [item["accepted"]["count"] for item in bins] == [2, 2]


def test_a_draft_without_a_confidence_output_is_not_watched():
    drafter = EagleDrafter(a_head(tiny_target()))
    assert watched(drafter) is drafter
    assert isinstance(watched(NoDraft()), NoDraft)
    assert calibration(drafter, []) == []
