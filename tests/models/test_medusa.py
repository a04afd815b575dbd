"""Medusa heads: their equation, their start, their files."""

import pytest
import torch
from architectures import target_of
from kit import tiny_target

from draftsmith.errors import UserError
from draftsmith.eval.drafters import Committed, MedusaDrafter
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import chain_shape, level_shape
from draftsmith.models.medusa import MedusaHeads, new_medusa_heads
from draftsmith.models.vocabulary import DraftVocabulary


def heads_for(target, count=3):
    heads = new_medusa_heads(target, DraftVocabulary.all_of(target.vocabulary), count)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return heads


def test_a_head_is_one_residual_block_and_its_own_output_head():
    target = tiny_target()
    heads, last = heads_for(target), torch.randn(2, 5, target.width)
    for k in range(3):
        x = last @ heads.blocks[k].weight.T + heads.blocks[k].bias
        wanted = (last + x * x.sigmoid()) @ heads.lm_heads[k].weight.T
        torch.testing.assert_close(heads.logits(heads.state(last, k), k), wanted)


@pytest.mark.parametrize("name", ["Llama", "Granite", "Cohere"])  # the last two scale their logits
def test_fresh_heads_predict_what_the_targets_own_head_does(name):
    target = target_of(name)
    half = DraftVocabulary(torch.arange(0, target.vocabulary, 2), target.vocabulary)
    heads, last = new_medusa_heads(target, half, 4), torch.randn(3, target.width)
    for k in range(4):
        torch.testing.assert_close(heads.logits(heads.state(last, k), k), target.head(last)[:, half.target_ids])


def test_save_and_load_is_bit_equal_and_another_target_is_refused(tmp_path):
    target = tiny_target()
    heads = heads_for(target)
    heads.save(tmp_path)
    loaded = MedusaHeads.load(tmp_path, target)
    assert loaded.config == heads.config
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in heads.state_dict().items())
    with pytest.raises(UserError, match="made for target"):
        MedusaHeads.load(tmp_path, tiny_target(seed=1))


def test_every_level_of_a_tree_comes_from_the_newest_state():
    target = tiny_target()
    heads, last = heads_for(target), torch.randn(1, 4, target.width)
    committed = Committed([[1, 2, 3, 4, 5]], last, None, torch.tensor([4]))
    proposal = MedusaDrafter(heads).propose(committed, level_shape([2, 2]), Sampler(0.0))
    first, second = (heads.logits(heads.state(last[0, -1], k), k).topk(2).indices.tolist() for k in (0, 1))
    assert proposal.tokens[0].tolist() == [5, *first, *second, *second]


def test_a_tree_deeper_than_the_heads_is_refused():
    target = tiny_target()
    committed = Committed([[1, 2]], torch.randn(1, 1, target.width), None, torch.tensor([1]))
    with pytest.raises(UserError, match="draft 3 tokens ahead"):
        MedusaDrafter(heads_for(target)).propose(committed, chain_shape(4), Sampler(0.0))
