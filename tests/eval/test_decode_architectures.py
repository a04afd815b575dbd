"""Greedy decoding with drafts against `generate`, token for token, on every architecture that is supported."""

import pytest
import torch
from architectures import MOST, target_of

from draftsmith.eval.decode import Decoding, decode
from draftsmith.eval.drafters import EagleDrafter, LMDrafter
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import Dynamic, chain_shape
from draftsmith.models.eagle import new_eagle_head
from draftsmith.models.target import choose_taps
from draftsmith.models.vocabulary import DraftVocabulary

TOKENS = 6


@pytest.mark.parametrize("name", MOST)
def test_greedy_output_with_drafts_equals_generate_token_for_token(name):
    """The oracle's chains are always accepted, the random head's trees hardly ever; windows of 8 are crossed."""
    target = target_of(name)
    texts = [list(range(20, 29)), [7, 99, 31]]
    expected = [
        target.model.generate(torch.tensor([text]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)[
            0, len(text) :
        ].tolist()
        for text in texts
    ]
    head = new_eagle_head(target, choose_taps(target.blocks), DraftVocabulary.all_of(target.vocabulary))
    for drafter, shape in ((LMDrafter(target), chain_shape(2)), (EagleDrafter(head), Dynamic(2, 2, 5))):
        out = decode(target, drafter, texts, Decoding(shape, Sampler(0.0), max_new_tokens=TOKENS, eos_ids=frozenset()))
        assert [result.tokens for result in out] == expected
        if isinstance(drafter, LMDrafter):
            assert [len(result.trace) for result in out] == [2, 2]  # three tokens each
