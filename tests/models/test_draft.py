"""Draft LMs cut out of their target or built from scratch."""

import pytest
import torch
from kit import FLAVOURS, tiny_target

from draftsmith.errors import UserError
from draftsmith.models.draft import DraftLM


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_draft_of_all_blocks_is_the_target(flavour):
    target = tiny_target(flavour)
    draft = DraftLM.from_target_blocks(target, range(target.blocks))
    ids = torch.randint(6, 100, (2, 20))
    torch.testing.assert_close(draft.forward(ids).logits, target.forward(ids).logits, atol=0, rtol=0)


def test_a_draft_of_some_blocks_runs_these_blocks():
    target = tiny_target()
    draft = DraftLM.from_target_blocks(target, [1, 3])
    model = target.model.model
    for new, old in enumerate((1, 3)):
        assert torch.equal(draft.model.model.layers[new].mlp.up_proj.weight, model.layers[old].mlp.up_proj.weight)
    assert draft.blocks == 2


def test_save_and_load_gives_the_same_logits(tmp_path):
    target = tiny_target()
    draft = DraftLM.from_scratch(target, {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24}, seed=1)
    draft.save(tmp_path, target)
    ids = torch.randint(6, 100, (1, 10))
    loaded = DraftLM.load(tmp_path, target)
    torch.testing.assert_close(loaded.forward(ids).logits, draft.forward(ids).logits, atol=0, rtol=0)


@pytest.mark.parametrize("blocks", [[], [4], [-1]])
def test_blocks_that_the_target_does_not_have_are_refused(blocks):
    with pytest.raises(UserError, match=r"distill\.blocks"):
        DraftLM.from_target_blocks(tiny_target(), blocks)


def test_impossible_shapes_are_refused_in_one_line():
    with pytest.raises(UserError, match=r"distill\.shape") as caught:
        DraftLM.from_scratch(tiny_target(), {"num_attention_heads": 0}, seed=0)
    assert "\n" not in str(caught.value)


def test_a_draft_of_another_vocabulary_is_refused(tmp_path):
    DraftLM.from_target_blocks(tiny_target("padded-vocab"), [0]).save(tmp_path, tiny_target("padded-vocab"))
    with pytest.raises(UserError, match="tokens"):
        DraftLM.load(tmp_path, tiny_target())


@pytest.mark.parametrize("shape", [{"hiden_size": 16}, {"vocab_size": 20}])
def test_a_misspelt_size_and_another_vocabulary_are_refused(shape):
    with pytest.raises(UserError, match=next(iter(shape))):
        DraftLM.from_scratch(tiny_target(), shape, seed=0)
