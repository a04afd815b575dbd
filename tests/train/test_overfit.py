"""One sample over-fitted: the decoder accepts whole blocks of it. Whatever is shifted between training and decoding shows here."""

import pytest
import torch
from kit import TAPS, tiny_target

from draftsmith.data.batches import Batch, TopK
from draftsmith.eval.decode import speculative_decode
from draftsmith.models.draft import DraftLM
from draftsmith.models.eagle import new_eagle_head
from draftsmith.models.medusa import new_medusa_heads
from draftsmith.models.vocabulary import DraftVocabulary
from draftsmith.train.objectives import DraftLMObjective, EagleObjective, MedusaObjective

K, NEW = 4, 30


def objective_of(kind, target):
    full = DraftVocabulary.all_of(target.vocabulary)
    if kind == "draft LM":
        return DraftLMObjective(DraftLM.from_target_blocks(target, [0]))
    if kind == "Medusa":
        return MedusaObjective(new_medusa_heads(target, full, heads=K))
    if kind == "EAGLE-1":
        return EagleObjective(new_eagle_head(target, (), full, kind="eagle1"), K)
    return EagleObjective(new_eagle_head(target, TAPS, full), K)


@pytest.mark.parametrize("kind", ["draft LM", "EAGLE-1", "EAGLE-3", "Medusa"])
def test_of_an_overfitted_text_every_drafted_block_is_accepted(kind):
    torch.manual_seed(0)
    target, prompt = tiny_target(), [7, 11, 23, 5]
    text = prompt + speculative_decode(target, None, prompt, max_new_tokens=NEW).tokens
    ids = torch.tensor([text])
    with torch.no_grad():
        out = target.forward(ids, TAPS)
    log_probs, top = out.logits.log_softmax(-1).topk(1)
    certain = TopK(top, torch.full_like(log_probs, -1e-4))  # the greedy choice and nothing else
    everything = torch.ones_like(ids, dtype=torch.bool)
    batch = Batch(ids, everything, torch.tensor([len(text)]), out.taps, out.last, certain)
    objective = objective_of(kind, target)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(90):
        optimizer.zero_grad()
        objective(batch).loss.backward()
        optimizer.step()
    draft = {"EAGLE-1": "eagle", "EAGLE-3": "eagle", "Medusa": "medusa", "draft LM": "_draft"}[kind]
    decoded = speculative_decode(target, getattr(objective, draft), prompt, K=K, max_new_tokens=NEW)
    assert decoded.tokens == text[len(prompt) :]
    assert [verify.accepted for verify in decoded.trace[:-1]] == [K] * (len(decoded.trace) - 1)
    assert len(decoded.trace) == -(-len(decoded.tokens) // (K + 1))
