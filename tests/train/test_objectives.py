"""From a batch to a loss: which teacher, which token and which weight each prediction gets, whatever the cache keeps."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kit import TAPS, a_batch, a_head, objectives, tiny_rows, tiny_target

from draftsmith.data.batches import Batch, Sampled, TopK
from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.data.cache.reader import CacheReader
from draftsmith.errors import UserError
from draftsmith.models.draft import DraftLM
from draftsmith.models.eagle import EagleHead, new_eagle_head
from draftsmith.models.vocabulary import DraftVocabulary
from draftsmith.train import fused
from draftsmith.train.eagle import draft_vocabulary, train_eagle
from draftsmith.train.held_out import HeldOut
from draftsmith.train.losses import LOSSES, Loss, cross_entropy, make_loss
from draftsmith.train.objectives import DraftLMObjective, EagleObjective
from draftsmith.train.settings import EagleTrainSettings, TrainSettings
from draftsmith.train.teachers import frozen_head


def with_gradient(objective, batch):
    """Loss, acceptance per step and the gradient of all weights."""
    objective.zero_grad()
    sums = objective(batch)
    sums.loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in objective.parameters() if p.grad is not None])
    return sums.loss.detach(), sums.accepted, gradient


def assert_equal(a, b, tolerance=1e-4):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, atol=tolerance, rtol=tolerance)


def pruned(target, size=60):
    ids = torch.randperm(target.vocabulary, generator=torch.Generator().manual_seed(2))[:size].sort().values
    head = new_eagle_head(target, TAPS, DraftVocabulary(ids, target.vocabulary))
    return EagleObjective(head, 2, 0.8)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("name", ["forward_kl", "total_variation"])
def test_a_teacher_from_the_last_state_equals_a_cache_of_all_probabilities(name, temperature, monkeypatch):
    target = tiny_target()
    monkeypatch.setattr(fused, "CHUNK_NUMBERS", 4 * target.vocabulary)
    everything = a_batch(target, [24, 16], k=target.vocabulary)
    for objective in [*objectives(target), pruned(target)]:
        objective.loss = make_loss(TrainSettings(loss=name, temperature=temperature))
        objective.target_head = frozen_head(target)
        assert_equal(
            with_gradient(objective, replace(everything, teacher=None)), with_gradient(objective, everything), 1e-3
        )


def changed(batch, change):
    """The batch with `change` applied to each of its tensors; name → tensor → tensor."""
    fields = {name: change(name, value) for name, value in vars(batch).items() if name != "teacher"}
    return Batch(**fields, teacher=TopK(*(change(name, value) for name, value in batch.teacher._asdict().items())))


def padded(batch, size):
    """The batch with unsupervised slots behind, up to `size`, that hold anything."""
    generator = torch.Generator().manual_seed(4)

    def pad(name, tensor):
        if name == "lengths":
            return tensor
        shape = (len(tensor), size - tensor.shape[1], *tensor.shape[2:])
        if tensor.is_floating_point():
            more = torch.randn(shape, generator=generator)
        else:
            more = torch.randint(2 if name == "token_ids" else 1, (shape), generator=generator) * 9
        return torch.cat([tensor, more.to(tensor.dtype)], 1)

    return changed(batch, pad)


LOSS_SETTINGS = [{"loss": name} for name in LOSSES] + [
    {"loss": {"jensen_shannon": 0.3, "cross_entropy": 0.5, "total_variation": 1.0}, "rest": "tail"},
    {"loss": {"negative_log_acceptance": 1.0, "adaptive_kl_tv": 0.5}, "rest": "tail"},
]


@pytest.mark.parametrize("which", [0, 1], ids=["draft", "eagle"])
@pytest.mark.parametrize("settings", LOSS_SETTINGS, ids=lambda settings: str(settings["loss"]))
def test_gradients_depend_neither_on_accumulation_nor_on_padding(which, settings):
    """FAULTS 25: eight rows as 1×8 and as 4×2, padded to 64 and to 128, with masks and weights of very unequal size."""
    target = tiny_target()
    draft, head = DraftLM.from_target_blocks(target, [0, 3]), a_head(target)
    objective = (DraftLMObjective(draft), EagleObjective(head, 3, 0.8))[which]
    objective.loss = make_loss(TrainSettings(**settings))
    batch = a_batch(target, [57, 5, 33, 9, 48, 20, 3, 26])
    batch.supervised[1::3] = False
    batch = replace(batch, weights=torch.rand(batch.supervised.shape, generator=torch.Generator().manual_seed(1)))

    def gradient(size, at_once):
        objective.zero_grad()
        whole = padded(batch, size)
        parts = [changed(whole, lambda _, t, i=i: t[i : i + at_once]) for i in range(0, 8, at_once)]
        weight = sum(map(objective.weight, parts))
        for part in parts:
            (objective(part).loss / weight).backward()
        return torch.cat([p.grad.flatten() for p in objective.parameters() if p.grad is not None])

    expected = gradient(64, 8)
    assert expected.abs().max() > 1e-3
    for size, at_once in ((64, 2), (128, 8), (128, 2)):
        torch.testing.assert_close(gradient(size, at_once), expected, atol=1e-6, rtol=0)


def test_a_sampled_teacher_of_very_many_draws_nears_the_full_one():
    """Draws weighed by their share: 40 000 a position, acceptance within 1 %; an unused place changes nothing."""
    target = tiny_target()
    batch = a_batch(target, [24, 16], k=target.vocabulary)
    p = batch.teacher.log_probs.exp()
    drawn = torch.multinomial(p.flatten(0, 1), 40_000, replacement=True).view(*p.shape[:2], -1)
    weights = torch.zeros_like(p).scatter_add(2, drawn, torch.ones_like(drawn, dtype=p.dtype)) / drawn.shape[2]
    ids = torch.where(weights > 0, batch.teacher.ids, -1)
    sampled = replace(batch, teacher=Sampled(ids, batch.teacher.log_probs, weights))
    for objective in [*objectives(target), pruned(target)]:
        (loss, accepted, _), (true_loss, true_accepted, _) = (with_gradient(objective, b) for b in (sampled, batch))
        torch.testing.assert_close(loss, true_loss, rtol=0.02, atol=0)
        torch.testing.assert_close(accepted, true_accepted, rtol=0.01, atol=0)


def test_cross_entropy_is_on_the_texts_own_next_token():
    target = tiny_target()
    batch = a_batch(target, [24, 16])
    for objective in [*objectives(target), pruned(target)]:
        objective.loss = Loss(((1.0, cross_entropy),), needs_tokens=True)
        wanted = 0.0
        for k, (slots, logits) in enumerate(objective.predictions(batch)):
            rows, columns = slots.nonzero(as_tuple=True)
            own = objective.vocabulary.to_draft(batch.token_ids[rows, columns + objective.lead + k])
            wanted += objective.decay**k * F.cross_entropy(logits, own, ignore_index=-1, reduction="sum")
        torch.testing.assert_close(objective(batch).loss, wanted)


def test_weights_multiply_the_predictions_of_their_tokens():
    """A weight of 0 is as if the token were not supervised, 2 counts twice, in the loss and in what it is divided by."""
    target = tiny_target()
    batch = a_batch(target, [24, 16])
    chosen = torch.zeros(2, 24)
    chosen[:, ::3] = 1
    fewer = replace(batch, supervised=batch.supervised & chosen.bool())
    for objective in objectives(target):
        (loss, accepted, gradient), (wanted, _, its_gradient) = (
            with_gradient(objective, b) for b in (replace(batch, weights=2 * chosen), fewer)
        )
        assert_equal((loss, gradient), (2 * wanted, 2 * its_gradient), 1e-5)
        assert objective.weight(replace(batch, weights=2 * chosen)) == pytest.approx(2 * objective.weight(fewer))
        torch.testing.assert_close(accepted, objective(batch).accepted)  # a fact of the draft, not of the weights


def test_a_temperature_without_the_whole_distribution_is_refused_by_name():
    target = tiny_target()
    batch = a_batch(target, [16])
    draws = Sampled(batch.teacher.ids, batch.teacher.log_probs, torch.full_like(batch.teacher.log_probs, 0.2))
    for objective in objectives(target):
        objective.loss = make_loss(TrainSettings(temperature=2))
        for teacher in (batch.teacher, draws):
            with pytest.raises(UserError, match=r"temperature 2.0: .*cache.distribution=from_last"):
                objective(replace(batch, teacher=teacher))


def test_neither_distribution_nor_last_state_is_refused():
    target = tiny_target()
    batch = replace(a_batch(target, [16]), teacher=None, last=None)
    for objective in objectives(target):
        with pytest.raises(UserError, match="holds neither a distribution"):
            objective(batch)


def test_a_head_with_a_soft_cap_is_trained_through_its_cap():
    """Gemma's head is no mere matrix: loss and gradient equal those of its own logits."""
    target = tiny_target("gemma2")
    batch = a_batch(target, [24, 16], k=target.vocabulary)
    objective = DraftLMObjective(DraftLM.from_target_blocks(target, [0, 3]))
    assert objective.head(0) is None
    found = with_gradient(objective, batch)
    objective.zero_grad()
    [(slots, logits)] = objective.predictions(batch)
    rows, columns = slots.nonzero(as_tuple=True)
    log_p = torch.zeros_like(batch.teacher.log_probs).scatter(2, batch.teacher.ids, batch.teacher.log_probs)
    wanted = F.kl_div(logits.log_softmax(-1), log_p[rows, columns], reduction="sum", log_target=True)
    wanted.backward()
    gradient = torch.cat([p.grad.flatten() for p in objective.parameters() if p.grad is not None])
    assert_equal((found[0], found[2]), (wanted.detach(), gradient))


@pytest.mark.parametrize("loss", ["forward_kl", "adaptive_kl_tv"])
def test_a_pruned_head_trains_and_reports_coverage_and_ceiling(loss, tmp_path):
    """FAULTS 40 and 42: V = 152 above a tokenizer of 150, V_d = 144: it learns, and its acceptance stays below the ceiling."""
    target = tiny_target(vocabulary=152)
    rows = tiny_rows(tmp_path, [12 + i % 20 for i in range(24)])
    build_cache(target, rows, tmp_path / "cache", CacheSettings(distribution="topk", state_codec="fp32", k=16))
    reader = CacheReader(tmp_path / "cache", target.fingerprint())
    logged = []
    settings = EagleTrainSettings(
        loss=loss, rollouts=2, draft_vocabulary=144, tokens=2000, batch_tokens=256, validations=2, held_out_rows=4
    )
    summary = train_eagle(
        target,
        reader,
        rows,
        settings,
        tmp_path / "head",
        seed=0,
        log=lambda record, step: logged.append((step, record)),
    )
    vocabulary = draft_vocabulary(reader, target, 144)
    text = torch.cat([torch.from_numpy(row.token_ids[row.supervised]).long() for row in reader])
    assert summary.coverage == pytest.approx(float(vocabulary.t2d[text].float().mean()))
    assert logged[0] == (0, {"vocabulary_coverage": summary.coverage, "acceptance_ceiling": summary.ceiling})
    inside = []
    for batch in HeldOut.of(target, [rows[i] for i in range(4)], ()).batches:
        first = int(batch.supervised[0].nonzero()[0])
        p = (
            target.forward(batch.token_ids).logits[0, first - 1 : -1].detach().softmax(-1)
        )  # supervised to the row's end
        inside.append(p[:, vocabulary.target_ids].sum(-1))
    assert summary.ceiling == pytest.approx(float(torch.cat(inside).mean()), abs=1e-5)
    assert summary.at_start[0] < summary.expected_acceptance[0] < summary.ceiling < 1
    assert EagleHead.load(tmp_path / "head", target).vocabulary.size == 144


def test_coverage_is_the_counted_share_of_the_drafts_tokens():
    vocabulary = DraftVocabulary(torch.tensor([0, 2]), 4)
    assert vocabulary.coverage(torch.tensor([3, 1, 2, 0])) == pytest.approx(5 / 6)
    assert vocabulary.coverage(torch.zeros(4)) == 1
    assert vocabulary.draft_first.tolist() == [0, 2, 1, 3]
