"""The training loop on tiny targets: plans, improvement on held-out text, the best weights, faults that stop it."""

import json

import numpy as np
import pytest
import torch
from kit import tiny_rows, tiny_target, tiny_tokenizer

from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.data.cache.reader import CacheReader
from draftsmith.data.corpus import DataSettings
from draftsmith.data.rows import Rows, write_rows
from draftsmith.data.tokenizer import tokenizer_digest
from draftsmith.errors import UserError
from draftsmith.models.draft import DraftLM
from draftsmith.models.eagle import EagleHead
from draftsmith.train.distill import distill
from draftsmith.train.eagle import draft_vocabulary, train_eagle
from draftsmith.train.loop import batch_plan
from draftsmith.train.settings import DistillSettings, EagleTrainSettings, TrainSettings

QUICK = {"tokens": 3000, "batch_tokens": 256, "validations": 3, "held_out_rows": 4, "log_every": 1}


@pytest.fixture
def made(tmp_path):
    """A target, a cache of 24 short rows of it, and rows that stand in for held-out ones."""
    target = tiny_target()
    rows = tiny_rows(tmp_path, [12 + i % 20 for i in range(24)])
    build_cache(target, rows, tmp_path / "cache", CacheSettings(distribution="topk", state_codec="fp32", k=16))
    return target, CacheReader(tmp_path / "cache", target.fingerprint()), rows


def test_a_plan_sees_every_row_once_an_epoch_and_stops_at_the_token_budget():
    lengths = np.array([10, 20, 30, 40] * 5)
    plan = batch_plan(lengths, TrainSettings(tokens=1000, batch_tokens=80, accumulate=2), seed=1)
    seen = [row for step in plan for micro in step for row in micro]
    assert sorted(seen[:20]) == list(range(20))
    assert 1000 <= lengths[seen].sum() < 1000 + 80
    assert {len(step) for step in plan[:-1]} == {2}
    assert plan == batch_plan(lengths, TrainSettings(tokens=1000, batch_tokens=80, accumulate=2), seed=1)


def test_distilling_raises_acceptance_and_keeps_the_untrained_start(made, tmp_path):
    target, reader, rows = made
    summary = distill(target, reader, rows, DistillSettings(**QUICK), tmp_path / "draft", seed=0)
    assert summary.expected_acceptance[0] > summary.at_start[0] + 0.05
    start = DraftLM.from_target_blocks(target, [0, 3])
    untrained = DraftLM.load(tmp_path / "draft" / "untrained", target)
    for name, tensor in start.model.state_dict().items():
        assert torch.equal(tensor, untrained.model.state_dict()[name]), name
    lines = [json.loads(line) for line in (tmp_path / "draft" / "training.jsonl").read_text().splitlines()]
    assert {"step", "loss", "expected_acceptance", "learning_rate", "tokens_per_second", "memory_gb"} <= set(lines[0])
    assert lines[-1]["step"] == summary.steps


def test_training_an_eagle_head_raises_acceptance_at_every_depth(made, tmp_path):
    target, reader, rows = made
    settings = EagleTrainSettings(rollouts=3, **QUICK)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    summary = train_eagle(target, reader, rows, settings, tmp_path / "head", seed=0)
    assert all(after > start for after, start in zip(summary.expected_acceptance, summary.at_start, strict=True))
    assert EagleHead.load(tmp_path / "head", target).config.taps == reader.taps
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name  # FAULTS 51


def test_every_trained_tensor_moves(made, tmp_path):
    target, reader, rows = made
    train_eagle(target, reader, rows, EagleTrainSettings(rollouts=2, **QUICK), tmp_path / "a", seed=0)
    start = train_eagle.__globals__["new_eagle_head"](
        target, reader.taps, draft_vocabulary(reader, target, None), seed=0
    )
    trained = EagleHead.load(tmp_path / "a", target)
    for name, tensor in start.state_dict().items():
        assert not torch.equal(tensor, trained.state_dict()[name]), name


def test_a_smaller_vocabulary_takes_the_most_frequent_supervised_tokens(made):
    target, reader, _ = made
    counts = torch.zeros(target.vocabulary, dtype=torch.long)
    for row in reader:
        counts += torch.bincount(torch.from_numpy(row.token_ids[row.supervised]).long(), minlength=target.vocabulary)
    ids = set(draft_vocabulary(reader, target, 40).target_ids.tolist())
    special = set(target.tokenizer.all_special_ids) | set(target.eos_ids)
    assert special <= ids
    assert len(ids) == 40
    worst_inside = min(int(counts[i]) for i in ids - special)
    assert all(int(counts[i]) <= worst_inside for i in range(target.vocabulary) if i not in ids)


def only_first_two(lengths, folder):
    """Rows of which the second token alone is supervised: an EAGLE head predicts from the third on."""
    rows = list(tiny_rows(folder, lengths))
    rows = [row._replace(supervised=np.arange(len(row.token_ids)) == 1) for row in rows]
    write_rows(rows, folder / "short" / "train", DataSettings(), tokenizer_digest(tiny_tokenizer()))
    return Rows.open(folder / "short", "train")


def test_a_run_that_can_train_nothing_is_refused_and_so_is_held_out_text_that_measures_nothing(made, tmp_path):
    target, reader, rows = made
    short = only_first_two([8] * 6, tmp_path)
    build_cache(target, short, tmp_path / "of-short", CacheSettings(distribution="topk", k=4))
    settings = EagleTrainSettings(**QUICK | {"tokens": 60, "validations": 1}, rollouts=1)
    with pytest.raises(UserError, match=r"nothing trained in .* supervised token after its token 2"):
        train_eagle(target, CacheReader(tmp_path / "of-short"), rows, settings, tmp_path / "a", seed=0)
    with pytest.raises(UserError, match="none of the held-out rows has a supervised token"):
        train_eagle(target, reader, short, settings, tmp_path / "b", seed=0)
    assert not (tmp_path / "a" / "model.safetensors").exists()


def test_a_loss_that_is_not_finite_names_step_and_rows(made, tmp_path, monkeypatch):
    target, reader, rows = made
    monkeypatch.setattr("draftsmith.train.losses.LOSSES", {"forward_kl": lambda m: m.log_q.sum(-1) * np.nan})
    with pytest.raises(UserError, match=r"nan at step 0, rows \["):
        distill(target, reader, rows, DistillSettings(**QUICK), tmp_path / "draft", seed=0)
