"""Acceptance on given text: against closed forms, against the trainer, and against what the decoder meets on the same text."""

import numpy as np
import pytest
import torch
from kit import STEPS, TAPS, a_head, tiny_target

from draftsmith.data.rows import Row
from draftsmith.eval.decode import Decoding, decode
from draftsmith.eval.drafters import EagleDrafter, LMDrafter, MedusaDrafter, PromptLookup
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.teacher_forced import acceptance_at, expected, forced_metrics
from draftsmith.eval.tree import chain_shape
from draftsmith.models.draft import DraftLM
from draftsmith.models.medusa import new_medusa_heads
from draftsmith.models.vocabulary import DraftVocabulary
from draftsmith.train.held_out import HeldOut
from draftsmith.train.objectives import DraftLMObjective, EagleObjective, MedusaObjective


def texts(count=3, length=24):
    rng = np.random.default_rng(1)
    return [
        Row(rng.integers(6, 100, length).astype(np.int32), np.arange(length) >= 5 + i, "code", f"d{i}")
        for i in range(count)
    ]


def medusa(target):
    heads = new_medusa_heads(target, DraftVocabulary.all_of(target.vocabulary), 3)
    torch.manual_seed(0)
    for parameter in heads.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return heads


def test_the_expected_acceptance_is_the_closed_form():
    """p = (.7, .2, .1), and a draft that can say tokens 1 and 2 only, q = (.6, .4): Σ min = .2 + .1."""
    p, q = torch.tensor([[0.7, 0.2, 0.1]]).log(), torch.tensor([[0.6, 0.4]]).log()
    vocabulary = DraftVocabulary(torch.tensor([1, 2]), 3)
    assert expected(p, q, vocabulary, Sampler(1.0)) == pytest.approx([0.3])
    assert expected(p, q, vocabulary, Sampler(1.0, greedy_draft=True)) == pytest.approx([0.2])
    assert expected(p, q, vocabulary, Sampler(0.0)) == [0.0]
    flat = (p / 2).softmax(-1)  # T = 2
    assert expected(p, q, vocabulary, Sampler(2.0)) == pytest.approx([float(flat[0, 1] + flat[0, 2])])


def test_it_is_what_training_measures_on_the_same_rows_at_every_depth():
    """Two computations of one number: the rollout here and the one of the trainer."""
    target = tiny_target()
    head, lm, heads = a_head(target), DraftLM.from_target_blocks(target, [0, 3]), medusa(target)
    pairs = [
        (EagleDrafter(head), EagleObjective(head, STEPS), STEPS),
        (LMDrafter(lm), DraftLMObjective(lm), 1),
        (MedusaDrafter(heads), MedusaObjective(heads), 3),
    ]
    held_out = HeldOut.of(target, texts(), TAPS)
    for drafter, objective, depths in pairs:
        [found] = forced_metrics(target, drafter, texts(), [Sampler(1.0)], depths)
        got = [depth["value"] for depth in found["alpha_teacher_forced_by_depth"]]
        assert got == pytest.approx(held_out.expected_acceptance(objective), abs=1e-4), type(drafter)
        assert found["alpha_teacher_forced"]["count"] == sum(int(t.supervised.sum()) for t in texts())


def test_on_the_text_that_was_decoded_it_says_of_each_verify_whether_its_first_token_stayed():
    target = tiny_target()
    for drafter in (EagleDrafter(a_head(target)), LMDrafter(DraftLM.from_target_blocks(target, [0, 3]))):
        how = Decoding(chain_shape(3), Sampler(0.0), max_new_tokens=16)
        seen = []
        for result in decode(target, drafter, [[9, 10, 11, 12], [20, 21, 22]], how):
            ids, place = result.prompt + result.tokens, len(result.prompt)
            forced = acceptance_at(target, drafter, ids, np.ones(len(ids), bool), [Sampler(0.0)], 1)[0, 0]
            for verify in result.trace:
                assert forced[place] == verify.hits[0]
                seen.append(verify.hits[0])
                place += verify.emitted
        assert len(seen) > 20


def test_the_oracle_is_accepted_everywhere_and_what_has_no_distribution_is_not_measured():
    target = tiny_target()
    [found] = forced_metrics(target, LMDrafter(target), texts(), [Sampler(1.0)], 4)
    assert found["alpha_teacher_forced"]["value"] == pytest.approx(1.0)
    assert found["tokens_per_verify_forced"] == pytest.approx(5.0)
    assert forced_metrics(target, PromptLookup(), texts(), [Sampler(1.0)], 4) == [{}]
    assert forced_metrics(target, LMDrafter(target), [], [Sampler(0.0), Sampler(1.0)], 4) == [{}, {}]


def test_a_single_place_is_one_too():
    """An answer of one verify: an index of one element must not be taken for a number."""
    target = tiny_target()
    wanted = np.zeros(8, dtype=bool)
    wanted[5] = True
    for drafter in (EagleDrafter(a_head(target)), LMDrafter(DraftLM.from_target_blocks(target, [0, 3]))):
        found = acceptance_at(target, drafter, np.arange(9, 17), wanted, [Sampler(0.0), Sampler(1.0)], 1)
        assert np.isfinite(found[:, 0]).sum(axis=1).tolist() == [1, 1]
        assert np.isfinite(found[:, 0, 5]).all()
