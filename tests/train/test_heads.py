"""Objectives of EAGLE-1 and Medusa, and what an EAGLE head can be trained for besides its loss."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kit import TAPS, a_batch, a_head, tiny_rows, tiny_target
from pydantic import ValidationError

from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.data.cache.reader import CacheReader
from draftsmith.errors import UserError
from draftsmith.eval.decode import Decoding, as_drafter, decode
from draftsmith.eval.drafters import EagleDrafter, MedusaDrafter
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import chain_shape
from draftsmith.models.eagle import EagleHead, head_config, new_eagle_head
from draftsmith.models.medusa import new_medusa_heads
from draftsmith.models.serving.export import export_draft
from draftsmith.models.serving.importing import import_draft
from draftsmith.models.vocabulary import DraftVocabulary
from draftsmith.train.eagle import (
    CachedTexts,
    draft_vocabulary,
    layer_start,
    new_head,
    new_objective,
    rows_in_turn,
    started_head,
    supervised_counts,
    train_eagle,
)
from draftsmith.train.feeder import batch_plan
from draftsmith.train.losses import forward_kl, plain
from draftsmith.train.objectives import EagleObjective, MedusaObjective
from draftsmith.train.rollout import rollout
from draftsmith.train.settings import EagleTrainSettings


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def batch(target):
    return a_batch(target, [20, 14])


def test_feature_regression_compares_each_state_with_the_targets_state_it_stands_for(target, batch):
    head = a_head(target, kind="eagle1")
    bare, with_it = EagleObjective(head, 3), EagleObjective(head, 3, feature_loss=10.0)
    extra = 0.0
    for k, states in enumerate(rollout(head, batch.token_ids, batch.last, 3)):
        for row, slot in bare.trained_slots(batch, k).nonzero().tolist():
            extra += 10 * F.smooth_l1_loss(states[row, slot], batch.last[row, slot + 1 + k])
    torch.testing.assert_close(with_it(batch).loss - bare(batch).loss, extra, rtol=1e-4, atol=1e-4)


def test_confidence_is_trained_towards_the_acceptance_of_each_prediction_and_changes_no_other_weight(target, batch):
    head = a_head(target, confidence=True)
    gradients = {}
    for weight in (0.0, 2.0):
        head.zero_grad()
        EagleObjective(head, 2, confidence=weight)(batch).loss.backward()
        gradients[weight] = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    for name, gradient in gradients[0.0].items():
        torch.testing.assert_close(gradient, gradients[2.0][name])
    expected = torch.zeros(())
    objective = EagleObjective(head, 2)
    for k, states in enumerate(objective.states(batch)):
        slots = objective.trained_slots(batch, k)
        _, reached = objective.head_loss(states[slots], k, objective.cached_teacher(batch, slots, k))
        expected = expected + 2 * (head.confidence(states[slots]).sigmoid() - reached).sum()
    torch.testing.assert_close(gradients[2.0]["confidence_head.bias"].sum(), expected, rtol=1e-4, atol=1e-5)


def test_noise_is_on_the_features_in_training_alone(target, batch):
    objective = EagleObjective(a_head(target), 1, noise=0.5)
    losses = [objective(batch).loss.item() for _ in range(2)]
    objective.eval()
    quiet = [objective(batch).loss.item() for _ in range(2)]
    assert losses[0] != losses[1]
    assert quiet[0] == quiet[1] == EagleObjective(objective.eagle, 1)(batch).loss.item()


def test_survival_weighs_each_prediction_by_the_acceptance_of_those_before_it(target, batch):
    head = a_head(target)
    objective = EagleObjective(head, 3, 0.9, survival=True)
    reach, total = torch.ones(batch.token_ids.shape), torch.zeros(())
    for k, states in enumerate(objective.states(batch)):
        slots = objective.trained_slots(batch, k)
        teacher = objective.cached_teacher(batch, slots, k)
        total = total + 0.9**k * (reach[slots] * plain(forward_kl, head.logits(states[slots]), teacher)).sum()
        reach[slots] *= objective.head_loss(states[slots], k, teacher)[1]
    torch.testing.assert_close(objective(batch).loss, total, rtol=1e-4, atol=1e-4)


def test_a_head_of_some_taps_reads_those_columns_of_the_batch_and_is_loaded_again(tmp_path, target, batch):
    settings = EagleTrainSettings(taps=(0, 2), rollouts=2, embedding_start=False)
    full = DraftVocabulary.all_of(target.vocabulary)
    head = new_head(target, TAPS, full, settings)
    assert head.config.taps == (0, 2)
    head.save(tmp_path)
    assert EagleHead.load(tmp_path, target).config == head.config
    objective = new_objective(head, target, TAPS, settings)
    assert torch.equal(objective.features(batch), batch.taps[:, :, [0, 2]])
    with pytest.raises(UserError, match="the cache has"):
        new_head(target, TAPS, full, EagleTrainSettings(taps=(0, 3)))


def test_a_medusa_head_is_taught_the_targets_distribution_at_the_position_it_predicts(target, batch):
    heads = new_medusa_heads(target, DraftVocabulary.all_of(target.vocabulary), 3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    objective, total = MedusaObjective(heads, 0.8), torch.zeros(())
    for k in range(3):
        for row, slot in objective.trained_slots(batch, k).nonzero().tolist():
            assert batch.supervised[row, slot + 2 + k]
            place = row, slot + 1 + k
            teacher_ids, log_p = batch.teacher.ids[place], batch.teacher.log_probs[place]
            log_q = heads.logits(heads.state(batch.last[row, slot], k), k).log_softmax(-1)
            p, rest = log_p.exp(), 1 - log_p.exp().sum()
            others = torch.ones(target.vocabulary, dtype=torch.bool)
            others[teacher_ids] = False
            kl = (p * (log_p - log_q[teacher_ids])).sum() + rest * (rest.log() - log_q[others].logsumexp(0))
            total = total + 0.8**k * kl
    torch.testing.assert_close(objective(batch).loss, total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "eagle1", "feature_loss": 10.0, "noise": 0.1, "rollouts": 1},
        {"kind": "eagle1", "detach": True, "rollouts": 3, "inputs": "unshifted"},
        {"kind": "medusa", "rollouts": 3, "draft_vocabulary": 100},
        {"norm_taps": True, "norm_state": True, "confidence": 1.0, "rollouts": 3, "draft_vocabulary": 0.9},
        {"width": 16, "layers": 2, "taps": (1, 2), "survival": True, "rollouts": 2},
        {"kv_heads": 4, "states_start": True, "feature_loss": 10.0, "rollouts": 2, "fc_bias": True},
    ],
    ids=["EAGLE-1", "HASS", "Medusa", "EAGLE-3.1", "narrow", "from states"],
)
def test_every_kind_trains_is_loaded_by_its_path_and_decodes_exactly(tmp_path, target, settings):
    rows = tiny_rows(tmp_path, [24, 30, 18, 40, 26, 33])
    build_cache(
        target, rows, tmp_path / "cache", CacheSettings(distribution="topk", state_codec="fp32", last=True, k=20)
    )
    reader = CacheReader(tmp_path / "cache")
    options = EagleTrainSettings(tokens=600, batch_tokens=64, matrix_lr=0.02, other_lr=0.01, **settings)
    summary = train_eagle(target, reader, rows, options, tmp_path / "head", 0)
    random = options.kind != "eagle3"
    assert summary.start == ("random" if random else "states" if options.states_start else "embedding")
    assert summary.expected_acceptance[0] > summary.at_start[0]
    drafter = as_drafter(tmp_path / "head", target)
    assert isinstance(drafter, MedusaDrafter if options.kind == "medusa" else EagleDrafter)
    prompts = [[7, 8, 9, 30], [40, 41]]
    common = {"sampler": Sampler(0.0), "max_new_tokens": 12, "eos_ids": frozenset()}
    plain_runs = decode(target, as_drafter(None, target), prompts, Decoding(chain_shape(1), **common))
    drafted = decode(target, drafter, prompts, Decoding(chain_shape(3), **common))
    assert [d.tokens for d in drafted] == [p.tokens for p in plain_runs]


def test_a_start_reads_the_rows_of_the_training_and_no_others(tmp_path, target):
    rows = tiny_rows(tmp_path, [24, 30, 18, 25, 26, 31, 22, 20])
    build_cache(
        target, rows, tmp_path / "cache", CacheSettings(distribution="topk", state_codec="fp32", last=True, k=20)
    )
    reader = CacheReader(tmp_path / "cache")
    settings = EagleTrainSettings(tokens=70, batch_tokens=64, states_start=True)
    trained = {row for step in batch_plan(reader.lengths, settings, 3) for micro in step for row in micro}
    assert len(trained) < len(reader)
    read = []

    class Watched:
        lengths, taps, tokens = reader.lengths, reader.taps, reader.tokens

        def __len__(self):
            return len(reader)

        def __getitem__(self, index):
            read.append(index)
            return reader[index]

    new_head(target, reader.taps, draft_vocabulary(reader, target, None), settings, Watched(), 3)
    assert set(read) == trained


class Damaged:
    """A cache whose row 0 cannot be read, and whose row 1 has a NaN among its taps."""

    def __init__(self, reader):
        self.reader, self.taps, self.lengths = reader, reader.taps, reader.lengths

    def __len__(self):
        return len(self.reader)

    def __getitem__(self, index):
        if index == 0:
            raise UserError("row 0: its checksum is wrong")
        row = self.reader[index]
        return row._replace(taps=row.taps * np.float32("nan")) if index == 1 else row


@pytest.mark.parametrize("options", [{}, {"states_start": True}], ids=["from the embedding", "from the states"])
def test_a_start_leaves_out_rows_that_cannot_be_read_or_are_not_finite(tmp_path, target, options):
    lengths, full = [24, 30, 18, 22], DraftVocabulary.all_of(target.vocabulary)
    rows = tiny_rows(tmp_path, lengths)
    build_cache(
        target, rows, tmp_path / "cache", CacheSettings(distribution="topk", state_codec="fp32", last=True, k=20)
    )
    reader, settings = CacheReader(tmp_path / "cache"), EagleTrainSettings(tokens=90, batch_tokens=64, **options)
    head = new_head(target, reader.taps, full, settings, Damaged(reader))
    start = "states" if options else "embedding"
    order = [row for row in rows_in_turn(reader, settings, 0) if row > 1] if options else [2, 3]
    assert set(order) == {2, 3}
    of_the_others = CachedTexts(target, reader, range(3), order)
    wanted = new_eagle_head(target, reader.taps, full, start=start, texts=of_the_others)
    for name, value in wanted.state_dict().items():
        assert torch.equal(head.state_dict()[name], value), name
    nothing = CachedTexts(target, Damaged(reader), range(3), [0, 1])
    with pytest.raises(UserError, match=rf"{start}_start: .* set {start}_start to false"):
        new_eagle_head(target, reader.taps, full, start=start, texts=nothing)


def test_a_start_without_anything_to_fit_is_refused_in_one_line(tmp_path, target):
    rows = tiny_rows(tmp_path, [1, 1, 24])
    full = DraftVocabulary.all_of(target.vocabulary)
    for last, index, said in ((True, 0, "no two neighbouring tokens"), (False, 2, "the cache holds no last states")):
        place = tmp_path / f"cache-{last}"
        build_cache(target, rows, place, CacheSettings(distribution="topk", state_codec="fp32", last=last, k=20))
        reader = CacheReader(place)
        texts = CachedTexts(target, reader, [0, 1, 2], [index])
        with pytest.raises(UserError, match=said):
            new_eagle_head(target, reader.taps, full, kv_heads=4, start="states", texts=texts)
        new_eagle_head(target, reader.taps, full, start="embedding", texts=texts)  # needs neither
    with pytest.raises(ValidationError, match="shifted"):
        EagleTrainSettings(states_start=True, inputs="unshifted")
    with pytest.raises(UserError, match="64 is wider than the target"):
        new_eagle_head(target, (0, 1), full, width=64)


def test_the_texts_of_a_start_are_the_caches_rows_with_their_tokens_embeddings(tmp_path, target):
    rows = tiny_rows(tmp_path, [24, 30, 18])
    build_cache(
        target, rows, tmp_path / "cache", CacheSettings(distribution="topk", state_codec="fp32", last=True, k=20)
    )
    reader = CacheReader(tmp_path / "cache")
    found = list(CachedTexts(target, reader, [2, 0], [2, 1]))
    assert [len(text.taps) for text in found] == [18, 30]
    row, text = reader[1], found[1]
    torch.testing.assert_close(text.taps, torch.from_numpy(row.taps[:, [2, 0]]))
    torch.testing.assert_close(text.last, torch.from_numpy(row.last))
    embeddings = target.model.get_input_embeddings().weight[torch.from_numpy(row.token_ids).long()]
    torch.testing.assert_close(text.embeddings, embeddings)


def test_weights_and_noise_of_a_run_are_its_seeds_whatever_the_process_did_before(tmp_path, target):
    rows = tiny_rows(tmp_path, [24, 30, 18])
    build_cache(
        target, rows, tmp_path / "cache", CacheSettings(distribution="topk", state_codec="fp32", last=True, k=20)
    )
    drawn = {"noise": 0.3, "fc_bias": True, "confidence": 1.0}
    options = EagleTrainSettings(kind="eagle1", rollouts=1, tokens=128, batch_tokens=64, **drawn)
    files = []
    for name in ("one", "two"):
        torch.rand(17)
        train_eagle(target, CacheReader(tmp_path / "cache"), rows, options, tmp_path / name, 3)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_training_goes_on_from_a_head_with_its_weights_and_its_mapping(tmp_path):
    """FAULTS 38: another corpus has other frequent tokens, and the mapping stays. 48: over a tied head, exported to each engine."""
    target = tiny_target("tied")
    rows = tiny_rows(tmp_path, [24, 30, 18])
    build_cache(target, rows, tmp_path / "cache", CacheSettings(distribution="topk", state_codec="fp32", k=20))
    reader, kept = CacheReader(tmp_path / "cache"), DraftVocabulary(torch.arange(6, 66), target.vocabulary)
    options = {"tokens": 64, "batch_tokens": 64, "matrix_lr": 1e-9, "other_lr": 1e-9, "rollouts": 2}
    for name, taps in (("head", reader.taps[:2]), ("elsewhere", (3,))):
        new_eagle_head(target, taps, kept, norm_state=True).save(tmp_path / name)
    settings = EagleTrainSettings(start=str(tmp_path / "head"), **options)
    assert train_eagle(target, reader, rows, settings, tmp_path / "continued", 0).start == "a head"
    before, after = (EagleHead.load(tmp_path / name, target) for name in ("head", "continued"))
    assert after.config == before.config
    assert torch.equal(after.vocabulary.target_ids, kept.target_ids)
    for name, value in before.state_dict().items():
        torch.testing.assert_close(after.state_dict()[name], value, atol=1e-6, rtol=0)
    for engine in ("vllm", "sglang", "trtllm", "speculators"):
        export_draft(tmp_path / "continued", target, engine, tmp_path / engine)
        import_draft(tmp_path / engine, target, tmp_path / f"{engine} back")
        again = EagleHead.load(tmp_path / f"{engine} back", target)
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in after.state_dict().items())
    for change, said in (
        ({"start": str(tmp_path / "elsewhere")}, "not 3"),
        ({"kind": "eagle1"}, "holds eagle3, not eagle1"),
        ({"kind": "medusa"}, "holds eagle3, not medusa"),
        ({"confidence": 1.0}, "no confidence output"),
    ):
        with pytest.raises(UserError, match=said):
            train_eagle(target, reader, rows, settings.model_copy(update=change), tmp_path / "x", 0)
    new_eagle_head(target, reader.taps, kept, width=16).save(tmp_path / "narrow")
    narrow = settings.model_copy(update={"start": str(tmp_path / "narrow"), "feature_loss": 1.0})
    with pytest.raises(UserError, match="set feature_loss to 0"):
        train_eagle(target, reader, rows, narrow, tmp_path / "x", 0)
    with pytest.raises(ValidationError, match="draft_vocabulary: a start from another head brings it along"):
        EagleTrainSettings(start="head", draft_vocabulary=60)
    new_medusa_heads(target, DraftVocabulary.all_of(target.vocabulary), 3).save(tmp_path / "medusa")
    with pytest.raises(UserError, match="has 3 Medusa heads"):
        started_head(tmp_path / "medusa", target, EagleTrainSettings(kind="medusa", rollouts=2))


def test_a_vocabulary_for_a_share_of_the_tokens_covers_it_and_is_no_larger_than_needed(tmp_path, target):
    rows = tiny_rows(tmp_path, [200] * 10)
    build_cache(target, rows, tmp_path / "cache", CacheSettings(distribution="topk", k=2))
    reader = CacheReader(tmp_path / "cache")
    counts = supervised_counts(reader, target.vocabulary)
    vocabulary = draft_vocabulary(reader, target, 0.5)
    assert vocabulary.coverage(counts) >= 0.5
    assert vocabulary.size < 0.6 * target.vocabulary


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({}, "embedding"),
        ({"states_start": True}, "states"),
        ({"embedding_start": False}, None),
        ({"inputs": "feature"}, None),
        ({"kv_heads": 4}, None),
        ({"kind": "eagle1"}, None),
    ],
)
def test_the_default_start_is_left_out_where_the_layer_could_not_carry_the_embedding(options, start):
    """A head that reads no embedding, or has more value dimensions (4 · 16) than it is wide (32)."""
    target, settings = tiny_target(head_dim=16), EagleTrainSettings(**options)
    shape = {name: options[name] for name in ("inputs", "kv_heads", "kind") if name in options}
    config = head_config(target, TAPS, DraftVocabulary.all_of(target.vocabulary), **shape)
    assert layer_start(config, settings) == start


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kind": "medusa", "layers": 2}, "layers"),
        ({"kind": "eagle1", "draft_vocabulary": 100}, "draft_vocabulary"),
        ({"kind": "eagle1", "norm_taps": True}, "norm_taps"),
        ({"width": 16, "feature_loss": 1.0}, "feature_loss"),
        ({"taps": (2, 0)}, r"taps: must rise.*\[0, 2\]"),
        ({"taps": (1, 1)}, "taps: must rise"),
        ({"states_start": True, "head_from_target": False}, "states_start.*head_from_target"),
        ({"draft_vocabulary": 1.0}, "1.0 is neither a share below 1"),
        ({"draft_vocabulary": 2048.0}, "neither a share below 1 nor a number of tokens"),
    ],
)
def test_options_that_a_kind_has_no_use_for_are_refused(settings, named):
    with pytest.raises(ValidationError, match=named):
        EagleTrainSettings(**settings)


def test_a_cache_without_last_states_is_refused_in_one_line(target, batch):
    objective = EagleObjective(a_head(target, kind="eagle1"), 1)
    with pytest.raises(UserError, match=r"cache\.last"):
        objective(replace(batch, last=None))
