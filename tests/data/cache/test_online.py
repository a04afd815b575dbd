"""`cache.online`: the target at work in place of a disk gives a trainer the same rows, batches and losses."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import tiny_rows, tiny_target

from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.data.cache.online import OnlineRows
from draftsmith.data.cache.reader import CacheReader
from draftsmith.errors import UserError
from draftsmith.train.distill import distill
from draftsmith.train.eagle import train_eagle
from draftsmith.train.settings import DistillSettings, EagleTrainSettings

FEW_STEPS = {"tokens": 800, "batch_tokens": 128, "validations": 1, "held_out_rows": 2, "log_every": 1}


def both(tmp_path: Path, **options: Any) -> tuple[Any, Any, CacheReader, OnlineRows]:
    settings = CacheSettings(**({"distribution": "topk", "state_codec": "fp32", "k": 16, "last": True} | options))
    target, rows = tiny_target(), tiny_rows(tmp_path, [12 + i % 20 for i in range(24)])
    build_cache(target, rows, tmp_path / "cache", settings)
    return target, rows, CacheReader(tmp_path / "cache"), OnlineRows(target, rows, settings)


def test_rows_and_batches_equal_those_of_a_cache(tmp_path: Path) -> None:
    _, _, reader, online = both(tmp_path)
    assert (len(online), online.taps, online.domains) == (len(reader), reader.taps, reader.domains)
    np.testing.assert_array_equal(online.lengths, reader.lengths)
    for index in (0, 5, -1):
        for ours, theirs in zip(online[index][:4], reader[index][:4], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)
        assert online[index].domain == reader[index].domain
        assert [part.tolist() for part in online.tokens(3)] == [part.tolist() for part in reader.tokens(3)]
    ours, theirs = online.batch([3, 1, 7]), reader.batch([3, 1, 7])
    for field in dataclasses.fields(ours):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name == "teacher":
            torch.testing.assert_close(a.log_probs, b.log_probs, atol=1e-5, rtol=0)
        elif a is None or b is None:
            assert a is b, field.name
        else:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "training.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("codec", "error"), [("fp32", 1e-6), ("bf16", 5e-3)])
def test_a_few_steps_of_both_trainers_have_the_losses_of_a_cached_run(tmp_path: Path, codec: str, error: float) -> None:
    target, rows, reader, online = both(tmp_path, state_codec=codec)
    for name, source in (("cached", reader), ("online", online)):
        distill(target, source, rows, DistillSettings(**FEW_STEPS), tmp_path / name / "draft", seed=0)
        settings = EagleTrainSettings(rollouts=2, draft_vocabulary=60, **FEW_STEPS)
        train_eagle(target, source, rows, settings, tmp_path / name / "head", seed=0)
    for draft in ("draft", "head"):
        cached, online_losses = losses(tmp_path / "cached" / draft), losses(tmp_path / "online" / draft)
        assert len(cached) >= 4
        # A step's rounding goes into all later ones: the first losses are those of equal weights.
        np.testing.assert_allclose(online_losses[:2], cached[:2], rtol=error)
        np.testing.assert_allclose(online_losses, cached, rtol=100 * error)


def test_a_target_that_computes_nan_is_named(tmp_path: Path) -> None:
    target, rows = tiny_target(), tiny_rows(tmp_path, (9,))
    online = OnlineRows(target, rows, CacheSettings(distribution="topk", k=4))
    target.model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(UserError, match="last are not finite in document document-0"):
        online.batch([0])


def test_identity_changes_with_target_rows_and_what_is_kept_as_that_of_a_cache_does(tmp_path: Path) -> None:
    settings = CacheSettings(distribution="topk", k=16)
    target, rows = tiny_target(), tiny_rows(tmp_path, [12, 20])
    own = OnlineRows(target, rows, settings).identity
    assert own == OnlineRows(target, rows, settings).identity
    others = [
        OnlineRows(tiny_target(seed=1), rows, settings),
        OnlineRows(target, tiny_rows(tmp_path / "other", [12, 20], seed=1), settings),
        OnlineRows(target, rows, CacheSettings(distribution="topk", k=8)),
    ]
    assert len({own, *(other.identity for other in others)}) == 4
