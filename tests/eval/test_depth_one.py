"""FAULTS 59: training, teacher forcing and decoding agree on the first drafted token, or the evaluation says so."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kit import TAPS, a_head, tiny_target

from draftsmith.data.rows import Row
from draftsmith.eval.decode import Decoding, decode
from draftsmith.eval.depth_one import FEWEST, depth_one, on_answers, on_texts, verdict
from draftsmith.eval.drafters import EagleDrafter, LMDrafter, NoDraft, PromptLookup
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import chain_shape
from draftsmith.models.draft import DraftLM
from draftsmith.train.held_out import HeldOut
from draftsmith.train.losses import Loss, cross_entropy
from draftsmith.train.objectives import DraftLMObjective, EagleObjective
from draftsmith.train.teachers import frozen_head

PROMPTS = [[6 + i, 40 - i, 60 + 2 * i] for i in range(10)]
GREEDY = Decoding(chain_shape(2), Sampler(0.0), max_new_tokens=24, eos_ids=frozenset())


class Trained:
    """A target, a head that has learnt its greedy continuations by heart, and what training says of it."""

    def __init__(self) -> None:
        self.target = tiny_target()
        own = decode(self.target, NoDraft(), PROMPTS, GREEDY)
        texts = [np.array([*answer.prompt, *answer.tokens], dtype=np.int32) for answer in own]
        self.rows = [Row(text, np.arange(len(text)) >= 3, "prose", "") for text in texts]
        self.head = a_head(self.target)
        objective = EagleObjective(
            self.head, 1, 1.0, Loss(((1.0, cross_entropy),), needs_tokens=True), frozen_head(self.target)
        )
        self.held_out = HeldOut.of(self.target, self.rows, TAPS)
        optimizer = torch.optim.Adam(self.head.parameters(), lr=0.01)
        for _ in range(6):
            for batch in self.held_out.batches:
                optimizer.zero_grad()
                objective(batch).loss.backward()
                optimizer.step()
        self.match = self.held_out.match(objective)

    def checks(self, drafter, trained):
        answers = decode(self.target, drafter, PROMPTS, GREEDY)
        return depth_one(
            [{"depth_one": on_answers(self.target, drafter, answers)}],
            trained,
            on_texts(self.target, drafter, self.rows),
        )


@pytest.fixture(scope="module")
def trained():
    return Trained()


def test_a_correct_head_agrees_to_the_last_position(trained):
    assert trained.match > 0.4, "a head that matches nothing could not be told from a broken one"
    found = trained.checks(EagleDrafter(trained.head), trained.match)
    assert set(found) == {"held_out", "answers"}
    assert [check["difference"] for check in found.values()] == [0.0, 0.0]
    assert all(check["ok"] for check in found.values())
    assert found["held_out"]["positions"] == 24 * len(PROMPTS)
    assert found["answers"]["decoded"] == pytest.approx(trained.match, abs=0.3), "of the places where a verify began"


def test_a_head_that_is_fed_the_next_layer_is_found_out(trained):
    """Decoding and teacher forcing both read the taps that the head's file names: only training knows better."""
    shifted = EagleDrafter(trained.head)
    config = trained.head.config
    trained.head.config, shifted.taps = replace(config, taps=(1, 2, 3)), (1, 2, 3)
    try:
        found = trained.checks(shifted, trained.match)
    finally:
        trained.head.config = config
    assert not found["held_out"]["ok"]
    assert found["answers"]["ok"]


def test_a_decoder_that_is_one_slot_off_is_found_out(trained, monkeypatch):
    """A fault of decoding alone: the states of the token before, at every slot."""
    honest = EagleDrafter.propose

    def late(self, committed, shape, sampler):
        if committed.taps.shape[1] > 1:
            committed = replace(committed, taps=committed.taps.roll(1, dims=1))
        else:
            committed = replace(committed, taps=torch.zeros_like(committed.taps))
        return honest(self, committed, shape, sampler)

    monkeypatch.setattr(EagleDrafter, "propose", late)
    found = trained.checks(EagleDrafter(trained.head), trained.match)
    assert found["held_out"]["ok"]
    assert not found["answers"]["ok"]
    assert found["answers"]["difference"] < -0.03


def test_a_draft_lm_agrees_too_and_prompt_lookup_is_not_asked(trained):
    draft = DraftLM.from_target_blocks(trained.target, [0, 1, 3])
    found = trained.checks(LMDrafter(draft), trained.held_out.match(DraftLMObjective(draft)))
    assert [check["difference"] for check in found.values()] == [0.0, 0.0]
    assert on_answers(trained.target, PromptLookup(), []) == {}
    assert depth_one([{"depth_one": {}}, {}], None, None) == {}


def test_a_few_ties_that_fall_the_other_way_are_no_contradiction():
    assert verdict(("a", "b"), 0.50, 0.40, 10 * (FEWEST - 1))["ok"], "seven positions"
    assert not verdict(("a", "b"), 0.50, 0.40, 10 * FEWEST)["ok"], "eight positions"
    assert verdict(("a", "b"), 0.50, 0.52, 100_000)["ok"], "below three in a hundred"
    assert not verdict(("a", "b"), 0.50, 0.54, 100_000)["ok"]
