"""The draft's own continuations among cached rows: who wrote what, who scores it, and that it is repeatable."""

import json
import os
import signal

import numpy as np
import pytest
import torch
from kit import tiny_rows, tiny_target
from safetensors.torch import load_file

from draftsmith.data.batches import Sampled
from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.data.cache.reader import CacheReader
from draftsmith.models.draft import DraftLM
from draftsmith.train.distill import distill
from draftsmith.train.on_policy import OnPolicy, after_eos, answers, listed
from draftsmith.train.settings import DistillSettings, OnPolicySettings

QUICK = {"tokens": 800, "batch_tokens": 128, "validations": 1, "held_out_rows": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    target = tiny_target()
    rows = tiny_rows(folder, [12 + i % 20 for i in range(12)])
    build_cache(target, rows, folder / "cache", CacheSettings(distribution="topk", state_codec="fp32", last=True, k=16))
    return target, CacheReader(folder / "cache", target.fingerprint()), rows


def on_policy(made, seed=0, draft=None, **options):
    target, reader, _ = made
    draft = draft or DraftLM.from_target_blocks(target, [0, 3])
    return OnPolicy(reader, draft, target, OnPolicySettings(**options), seed)


def test_chosen_rows_keep_prompt_and_length_and_are_scored_by_the_target(made):
    target, reader, _ = made
    cached, mixed = reader.batch(range(12)), on_policy(made, share=0.5).batch(range(12))
    changed = (cached.token_ids != mixed.token_ids).any(1)
    assert 2 <= int(changed.sum()) <= 10
    assert torch.equal(cached.lengths, mixed.lengths)
    starts, _ = answers(cached.supervised, cached.lengths)
    for row in range(12):
        n = int(cached.lengths[row])
        assert torch.equal(cached.token_ids[row, : starts[row]], mixed.token_ids[row, : starts[row]])
        with torch.no_grad():
            out = target.forward(mixed.token_ids[row : row + 1, :n])
        log_p = out.logits[0].log_softmax(-1).gather(-1, mixed.teacher.ids[row, :n])
        torch.testing.assert_close(log_p, mixed.teacher.log_probs[row, :n], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(out.last[0], mixed.last[row, :n], atol=1e-3, rtol=1e-3)


def test_a_checkpoint_of_rows_continued_by_the_draft_belongs_to_the_cache_below_them(made):
    assert on_policy(made).identity == made[1].identity != ""


def test_what_is_written_is_what_the_draft_says(made):
    """At a temperature near 0 every written token is the draft's likeliest one after all before it."""
    target, reader, _ = made
    draft = DraftLM.from_target_blocks(target, [1])
    mixed = on_policy(made, draft=draft, share=1.0, temperature=1e-4).batch(range(12))
    cached = reader.batch(range(12))
    starts, ends = answers(cached.supervised, cached.lengths)
    with torch.no_grad():
        best = draft.forward(mixed.token_ids).logits.argmax(-1)
    for row in range(12):
        a, b = int(starts[row]), int(ends[row])
        assert torch.equal(mixed.token_ids[row, a:b], best[row, a - 1 : b - 1])


def test_the_writing_draft_takes_new_weights_only_every_so_many_steps(made):
    target, _, _ = made
    draft = DraftLM.from_target_blocks(target, [1])
    source = on_policy(made, draft=draft, share=1.0, every=2, temperature=1e-4)

    def written(step):
        source.begin(step)
        return source.batch(range(12)).token_ids

    first = written(0)
    with torch.no_grad():
        draft.model.lm_head.weight.copy_(draft.model.lm_head.weight.flip(0))
    assert torch.equal(written(1), first)
    assert not torch.equal(written(2), first)


def test_the_same_seed_and_step_give_the_same_rows_and_others_give_other_rows(made):
    def written(seed, step):
        source = on_policy(made, seed=seed)
        source.begin(step)
        return source.batch(range(12)).token_ids

    first, again, *others = (written(*at) for at in ((1, 0), (1, 0), (2, 0), (1, 1)))
    assert torch.equal(first, again)
    assert all(not torch.equal(first, other) for other in others)


def test_a_row_becomes_the_same_in_any_batch(made):
    """So ranks and micro-batches share a step in any way, and a row that fails beside it changes nothing."""
    source = on_policy(made, share=0.5)
    whole = source.batch(range(12))
    for row in range(12):
        alone, n = source.batch([row]), int(whole.lengths[row])
        assert torch.equal(alone.token_ids[0], whole.token_ids[row, :n])
        torch.testing.assert_close(alone.teacher.log_probs[0], whole.teacher.log_probs[row, :n], atol=1e-5, rtol=0)


LONGER = QUICK | {"log_every": 1, "validations": 2, "tokens": 1500, "checkpoint_every": 3}


@pytest.mark.parametrize("selective", [False, True])
def test_killed_and_continued_an_on_policy_run_is_bit_equal_to_one_that_was_left_alone(made, tmp_path, selective):
    """FAULTS 33. Killed at step 8, continued at 6, where the writer has the weights of step 4."""
    target, reader, rows = made
    options = LONGER | {"on_policy": {"share": 0.7, "every": 4}}
    if selective:
        DraftLM.from_target_blocks(target, [0, 2]).save(tmp_path / "reference", target)
        options |= {"head": "shared", "selective": {"reference": str(tmp_path / "reference")}}
    settings = DistillSettings(**options)

    def run(name, log=None):
        distill(target, reader, rows, settings, tmp_path / name, seed=0, log=log)

    def killed(values, step):
        if step == 8:
            os.kill(os.getpid(), signal.SIGKILL)

    run("whole")
    if (pid := os.fork()) == 0:
        run("parts", killed)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    place = tmp_path / "parts" / "checkpoints" / "step-000000006"
    assert ("model.lm_head.weight" in load_file(place / "weights.safetensors")) is not selective
    assert ("lm_head.weight" in load_file(place / "source.safetensors")) is not selective
    run("parts")
    whole, parts = (
        DraftLM.load(tmp_path / name / "distilled", target).model.state_dict() for name in ("whole", "parts")
    )
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    whole, parts = (
        [json.loads(line)["loss"] for line in (tmp_path / name / "training.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    assert len(whole) > 10
    assert whole == parts


def test_on_policy_rows_change_what_is_trained_and_a_share_of_none_changes_nothing(made, tmp_path):
    target, reader, rows = made
    weights = {}
    for name, option in (("off", None), ("none", {"share": 0.0}), ("half", {"share": 0.5})):
        distill(target, reader, rows, DistillSettings(**QUICK, on_policy=option), tmp_path / name, seed=0)
        weights[name] = DraftLM.load(tmp_path / name / "distilled", target).model.state_dict()
    for name, value in weights["off"].items():
        assert torch.equal(value, weights["none"][name]), name
    assert any(not torch.equal(value, weights["half"][name]) for name, value in weights["off"].items())


def test_answers_are_the_last_supervised_run_or_the_second_half_of_a_text():
    supervised = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0], [0, 1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1]]).bool()
    starts, ends = answers(supervised, torch.tensor([8, 6, 8]))
    assert starts.tolist() == [5, 3, 3]
    assert ends.tolist() == [7, 6, 8]


def test_nothing_behind_an_end_of_text_is_trained():
    ids = torch.tensor([[0, 5, 5, 0, 7, 0, 8, 9]])
    masked = after_eos(ids, torch.tensor([2]), torch.tensor([7]), frozenset({0}))
    assert masked.tolist() == [[False, False, False, False, True, True, True, False]]


def test_a_sampled_teacher_of_written_rows_is_unbiased_and_lists_no_token_twice():
    torch.manual_seed(0)
    logits = torch.randn(1, 12).mul(2.0).expand(4000, -1)
    like = Sampled(torch.zeros(1, 1, 8, dtype=torch.long), torch.zeros(1, 1, 8), torch.zeros(1, 1, 8))
    ids, log_probs, weights = listed(logits, like, np.random.default_rng(0))
    p = logits[0].softmax(-1)
    mean = torch.zeros(4000, 13).scatter_add_(1, ids.where(ids >= 0, 12), weights).mean(0)
    # Five standard errors of 32,000 draws: one false alarm in 100,000 seeds, for twelve tokens.
    assert bool(((mean[:12] - p).abs() < 5 * (p * (1 - p) / 32_000).sqrt()).all())
    assert mean[12] == 0
    assert torch.allclose(log_probs[ids >= 0].exp(), p[ids[ids >= 0]])
    assert all(len(set(row[row >= 0].tolist())) == int((row >= 0).sum()) for row in ids[:50])
