"""Which tokens a selective run trains."""

import pytest
import torch
from kit import a_batch, tiny_target

from draftsmith.data.batches import supervised_slots
from draftsmith.models.draft import DraftLM
from draftsmith.train.losses import Teacher, forward_kl, plain
from draftsmith.train.objectives import DraftLMObjective
from draftsmith.train.selective import Selective


class OneBatch:
    """A source with one batch."""

    identity = "this batch and no other"

    def __init__(self, batch):
        self.lengths, self._batch = batch.lengths.numpy(), batch

    def batch(self, indices):
        return self._batch


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_the_share_of_predictions_with_the_largest_gap_to_the_reference_weighs_one(share):
    target = tiny_target()
    batch = a_batch(target, [20, 12, 17])
    start, reference = DraftLM.from_target_blocks(target, [0]), DraftLM.from_target_blocks(target, [0, 1, 3])
    objective = DraftLMObjective(start)
    source = Selective(OneBatch(batch), start, reference, share, objective.cached_teacher)
    assert source.identity == OneBatch.identity
    weights = source.batch([0, 1, 2]).weights
    slots = supervised_slots(batch.supervised, batch.lengths, 1)
    gaps = {}
    with torch.no_grad():
        for row, t in slots.nonzero().tolist():
            teacher = Teacher(batch.teacher.ids[row, t][None], batch.teacher.log_probs[row, t].exp()[None])
            losses = [
                plain(forward_kl, draft.forward(batch.token_ids[row : row + 1]).logits[:, t], teacher).item()
                for draft in (start, reference)
            ]
            gaps[row, t + 1] = losses[0] - losses[1]
    best = sorted(gaps, key=gaps.get, reverse=True)[: round(share * len(gaps))]
    assert {tuple(place) for place in weights.nonzero().tolist()} == set(best)
    assert set(weights.unique().tolist()) <= {0.0, 1.0}
