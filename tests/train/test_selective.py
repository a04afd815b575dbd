"""Which tokens a selective run trains."""

import pytest
import torch
from kit import a_batch, tiny_rows, tiny_target

from draftsmith.data.batches import supervised_slots
from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.data.cache.reader import CacheReader
from draftsmith.models.draft import DraftLM
from draftsmith.train.distill import distill
from draftsmith.train.losses import Teacher, forward_kl, plain
from draftsmith.train.objectives import DraftLMObjective
from draftsmith.train.selective import Selective
from draftsmith.train.settings import DistillSettings


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
    assert source.identity.startswith(OneBatch.identity)  # the rows are part of it, the reference another
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


def test_a_share_of_the_tokens_changes_what_distill_trains_and_all_of_them_change_nothing(tmp_path):
    target = tiny_target()
    rows = tiny_rows(tmp_path, [12 + i % 20 for i in range(12)])
    build_cache(
        target, rows, tmp_path / "cache", CacheSettings(distribution="topk", state_codec="fp32", taps="none", k=16)
    )
    reader = CacheReader(tmp_path / "cache", target.fingerprint())
    quick = {"tokens": 500, "batch_tokens": 128, "validations": 1, "held_out_rows": 2}
    references = {"one": [0, 2], "another": [1]}
    for name, blocks in references.items():
        DraftLM.from_target_blocks(target, blocks).save(tmp_path / name, target)

    def trained(name, **options):
        chosen = {"selective": {"reference": str(tmp_path / "one"), **options}} if options else {}
        distill(target, reader, rows, DistillSettings(**quick, **chosen), tmp_path / name, seed=0)
        weights = DraftLM.load(tmp_path / name / "distilled", target).model.state_dict()
        return torch.cat([value.flatten() for value in weights.values()])

    off = trained("off")
    assert torch.equal(trained("all", share=1.0), off)
    some = trained("some", share=0.3)
    assert not torch.equal(some, off)
    assert not torch.equal(trained("others", share=0.3, reference=str(tmp_path / "another")), some)


def test_training_is_not_continued_with_another_reference():
    target = tiny_target()
    drafts = [DraftLM.from_target_blocks(target, [block]) for block in (0, 0, 1)]
    source = OneBatch(a_batch(target, [8]))
    first, same, other = (Selective(source, drafts[0], draft, 0.5, None).identity for draft in drafts)
    assert first == same
    assert first != other
