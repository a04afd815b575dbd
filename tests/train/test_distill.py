"""Where a draft LM starts, and that every start trains, saves and decodes."""

import hashlib
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from kit import tiny_rows, tiny_target, tiny_target_folder
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.data.cache.reader import CacheReader
from draftsmith.data.rows import Row
from draftsmith.errors import Stopped
from draftsmith.eval.decode import Decoding, decode
from draftsmith.eval.drafters import LMDrafter, NoDraft
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import chain_shape
from draftsmith.models.draft import DraftLM
from draftsmith.models.target import Target
from draftsmith.train.distill import distill, new_draft
from draftsmith.train.held_out import HeldOut
from draftsmith.train.objectives import DraftLMObjective
from draftsmith.train.settings import DistillSettings

QUICK = {"tokens": 1500, "batch_tokens": 256, "validations": 1, "held_out_rows": 4, "log_every": 1}
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24}
STARTS = {
    "blocks": {"blocks": [0, 3]},
    "blocks, shared head": {"blocks": [0, 3], "head": "shared"},
    "scratch": {"shape": SMALL},
    "scratch, named": {"shape": "half"},
    "narrow": {"start": "narrow", "shape": SMALL},
    "narrow, fixed": {"start": "narrow", "shape": SMALL, "head": "shared"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A target, a cache of it, and rows that stand in for held-out ones."""
    folder = tmp_path_factory.mktemp("made")
    target = Target.load(tiny_target_folder(folder))
    rows = tiny_rows(folder, [12 + i % 20 for i in range(24)])
    build_cache(
        target, rows, folder / "cache", CacheSettings(distribution="topk", state_codec="fp32", taps="none", k=16)
    )
    return target, CacheReader(folder / "cache", target.fingerprint()), rows


def digest(target: Target) -> str:
    """Of every byte of the target's weights, read anew."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(target.model.state_dict().items()):
        hasher.update(name.encode() + tensor.numpy().tobytes())
    return hasher.hexdigest()


@pytest.mark.parametrize("start", STARTS)
def test_every_start_learns_and_is_saved_as_an_ordinary_folder_and_leaves_the_target_as_it_was(made, tmp_path, start):
    """FAULTS 51."""
    target, reader, rows = made
    before = digest(target)
    summary = distill(target, reader, rows, DistillSettings(**QUICK, **STARTS[start]), tmp_path, seed=0)
    assert summary.expected_acceptance[0] > summary.at_start[0]
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "distilled")
    start_of, end = (DraftLM.load(tmp_path / name, target) for name in ("untrained", "distilled"))
    same = (start_of.plain_head == end.plain_head).all()
    assert bool(same) == (STARTS[start].get("head") == "shared")
    assert alone.config.vocab_size == target.vocabulary
    assert digest(target) == before


@pytest.mark.parametrize(("flavour", "head"), [("tied", "copied"), ("tied", "shared"), ("plain", "shared")])
def test_with_a_tied_or_a_shared_head_a_stopped_run_continues_bit_equal(tmp_path, flavour, head):
    """FAULTS 33, 36, 48 for draft LMs: the checkpoint holds a tied matrix once and a frozen one never."""
    target = tiny_target(flavour)
    rows = tiny_rows(tmp_path, [12 + i % 20 for i in range(12)])
    build_cache(
        target, rows, tmp_path / "cache", CacheSettings(distribution="topk", state_codec="fp32", taps="none", k=16)
    )
    reader = CacheReader(tmp_path / "cache", target.fingerprint())
    settings = DistillSettings(**(QUICK | {"batch_tokens": 128}), head=head)

    def stops(values, step):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    def run(name, log=None):
        distill(target, reader, rows, settings, tmp_path / name, seed=0, log=log)

    run("whole")
    with pytest.raises(Stopped):
        run("parts", stops)
    saved = load_file(tmp_path / "parts" / "checkpoints" / "step-000000004" / "weights.safetensors")
    ends = {name for name in saved if "layers" not in name} - {"model.model.norm.weight"}
    assert ends == ({"model.model.embed_tokens.weight"} if head == "copied" else set())
    run("parts")
    whole, parts = (load_file(tmp_path / name / "distilled" / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    start = load_file(tmp_path / "whole" / "untrained" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(whole["model.embed_tokens.weight"], start) == (head == "shared")


def test_a_checkpoint_goes_on_from_where_it_was(made, tmp_path):
    target, reader, rows = made
    first = distill(target, reader, rows, DistillSettings(**QUICK), tmp_path / "first", seed=0)
    settings = DistillSettings(**QUICK, checkpoint=str(tmp_path / "first" / "distilled"))
    second = distill(target, reader, rows, settings, tmp_path / "second", seed=1)
    assert second.at_start == pytest.approx(first.expected_acceptance)


def test_the_expected_acceptance_of_training_is_what_the_decoder_measures(made, tmp_path):
    """FAULTS 31: within 0.02 at T = 1, on text that the target wrote. About 2,500 positions: a standard error below 0.005."""
    target, reader, rows = made
    distill(target, reader, rows, DistillSettings(**QUICK), tmp_path, seed=0)
    draft = DraftLM.load(tmp_path / "distilled", target)
    prompts = [[6 + i, 7, 8 + i] for i in range(64)]
    how = Decoding(chain_shape(3), Sampler(1.0), max_new_tokens=40, eos_ids=frozenset(), seed=1)
    written = decode(target, NoDraft(), prompts, how)
    texts = [np.array([*result.prompt, *result.tokens]) for result in written]
    held_out = [Row(text, np.arange(len(text)) >= 3, "prose", "") for text in texts]
    [expected] = HeldOut.of(target, held_out, ()).expected_acceptance(DraftLMObjective(draft))
    traces = [result.trace for result in decode(target, LMDrafter(draft), prompts, replace(how, seed=2))]
    overlaps = [overlap for trace in traces for verify in trace for overlap in verify.overlaps]
    assert expected == pytest.approx(np.mean(overlaps), abs=0.02)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"blocks": [0], "shape": {"hidden_size": 8}}, "no use for blocks"),
        ({"start": "narrow"}, "needs shape"),
        ({"start": "checkpoint"}, "needs checkpoint"),
        ({"start": "blocks", "checkpoint": "x"}, "no use for checkpoint"),
        ({"shape": {"hidden_size": 8}, "head": "shared"}, "no embedding of its target"),
    ],
)
def test_starts_that_contradict_themselves_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        DistillSettings(**fields)


def test_the_default_start_is_the_first_and_the_last_block():
    assert new_draft(tiny_target(), DistillSettings(), 0).blocks == 2
    assert DistillSettings().starts_from == "blocks"
    assert DistillSettings(shape={"hidden_size": 8}).starts_from == "scratch"
