"""What a cache's fields hold once they are on disk, for every codec (FAULTS 12, 13, 18)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import tiny_rows, tiny_target
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.codecs import STATE_CODECS
from draftsmith.data.cache.fields import bytes_per_token, cache_fields, row_uniforms
from draftsmith.data.cache.manifest import CacheSettings, read_manifest, write_manifest
from draftsmith.data.cache.reader import CacheReader
from draftsmith.data.cache.verify import cache_info, check_against_target
from draftsmith.data.corpus import DataSettings
from draftsmith.data.rows import Rows, write_rows
from draftsmith.errors import UserError
from draftsmith.models.target import Target
from draftsmith.train.losses import forward_kl, plain, total_variation
from draftsmith.train.teachers import Teacher, dense_teacher

LENGTHS = (1, 60, 2, 37, 8)
ALONE = {"batch_tokens": 1}  # rows pass the target one by one, as a live pass does: equal to the last bit


def cached(tmp_path: Path, target: Target, rows: Rows, name: str = "cache", **options: Any) -> CacheReader:
    settings = {
        "distribution": "topk",
        "state_codec": "fp32",
        "k": 16,
        "last": True,
        "batch_tokens": 200,
        "shard_mb": 1.0,
    }
    build_cache(target, rows, tmp_path / name, CacheSettings(**(settings | options)))
    return CacheReader(tmp_path / name, target.fingerprint())


@torch.inference_mode()
def live_logits(target: Target, token_ids: np.ndarray) -> torch.Tensor:
    return target.forward(torch.from_numpy(token_ids).long()[None]).logits[0]


def test_bytes_per_token_of_a_known_cache() -> None:
    settings = CacheSettings(distribution="topk", taps=(0, 1, 2), k=64, last=True)
    assert bytes_per_token(cache_fields(settings, 256, 4000, 4)) == 2 + 1 + 3 * 512 + 512 + 64 * (2 + 4)
    settings = CacheSettings(taps=(0, 1, 2), k=32, state_codec="int4", distribution="topk8")
    assert bytes_per_token(cache_fields(settings, 256, 4000, 4)) == 2 + 1 + 3 * (128 + 2) + 32 * (2 + 1) + 6
    settings = CacheSettings(taps=(0, 1, 2), k=32, state_codec="fp8", distribution="sampled")
    assert bytes_per_token(cache_fields(settings, 33, 70_000, 4)) == 4 + 1 + 3 * (33 + 2) + 32 * (4 + 1 + 2)
    settings = CacheSettings(taps="none", distribution="from_last", state_codec="int8")
    assert bytes_per_token(cache_fields(settings, 256, 4000, 4)) == 2 + 1 + 258


@pytest.mark.parametrize("codec", STATE_CODECS)
@pytest.mark.parametrize("distribution", ["topk", "topk8", "sampled", "from_last"])
def test_any_pair_of_codecs_is_written_read_checked_and_as_large_as_said(
    tmp_path: Path, codec: str, distribution: str
) -> None:
    target, rows = tiny_target(), tiny_rows(tmp_path, LENGTHS)
    reader = cached(tmp_path, target, rows, state_codec=codec, distribution=distribution)
    assert check_against_target(tmp_path / "cache", target) == []
    info = cache_info(tmp_path / "cache")
    assert info["bytes_per_token"] * info["tokens"] == pytest.approx(
        bytes_per_token(reader.manifest.fields) * rows.tokens, abs=2048
    )
    batch = reader.batch([1, 4])
    assert batch.last is not None
    assert batch.taps is not None
    assert type(batch.teacher).__name__ == {"sampled": "Sampled", "from_last": "NoneType"}.get(distribution, "TopK")


def test_token_ids_are_stored_in_a_byte_where_it_is_enough_and_read_as_before(tmp_path: Path) -> None:
    target, rows = tiny_target(), tiny_rows(tmp_path, LENGTHS)
    reader = cached(tmp_path, target, rows)
    assert load_file(tmp_path / "cache" / "shard-00000.safetensors")["token_ids"].dtype == torch.uint8
    for row, stored in zip(rows, reader, strict=True):
        assert stored.token_ids.dtype == np.int32
        assert stored.token_ids.tolist() == row.token_ids.tolist()


def test_from_last_stores_the_last_state_without_being_told_and_says_no_to_the_contrary() -> None:
    assert CacheSettings(distribution="from_last").last
    with pytest.raises(ValidationError, match="leave last out or make it true"):
        CacheSettings(distribution="from_last", last=False)
    fields = cache_fields(CacheSettings(distribution="from_last", k=9), 32, 150, 4)
    assert fields["distribution"] == {"codec": "from_last", "vocabulary": 150}


def test_from_last_keeps_the_last_state_to_the_last_bit_and_with_it_the_logits(tmp_path: Path) -> None:
    target, rows = tiny_target("gemma2"), tiny_rows(tmp_path, LENGTHS)
    for row in cached(tmp_path, target, rows, distribution="from_last", **ALONE):
        assert row.distribution is None
        with torch.inference_mode():
            live = target.forward(torch.from_numpy(row.token_ids).long()[None])
            assert torch.equal(torch.from_numpy(row.last), live.last[0])
            torch.testing.assert_close(target.head(torch.from_numpy(row.last)), live.logits[0], atol=1e-6, rtol=1e-6)


def test_more_draws_than_a_byte_counts_are_refused_and_more_than_tokens_are_not(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cache\.k: 256 draws"):
        cache_fields(CacheSettings(distribution="sampled", k=256), 32, 150, 4)
    reader = cached(tmp_path, tiny_target(), tiny_rows(tmp_path, (9,)), distribution="sampled", k=255)
    assert reader[0].distribution[0].shape == (9, 255)


def test_draws_depend_on_the_row_alone(tmp_path: Path) -> None:
    target, rows = tiny_target(), tiny_rows(tmp_path, LENGTHS)
    order = [3, 1, 4, 0, 2]
    write_rows([rows[i] for i in order], tmp_path / "shuffled" / "train", DataSettings(), rows.tokenizer)
    base = cached(tmp_path, target, rows, distribution="sampled", **ALONE)
    other = cached(tmp_path, target, Rows.open(tmp_path / "shuffled", "train"), "other", distribution="sampled")
    for place, index in enumerate(order):
        assert base[index].distribution[0].tolist() == other[place].distribution[0].tolist()
        assert base[index].distribution[2].tolist() == other[place].distribution[2].tolist()


def test_uniforms_are_those_of_the_content_whatever_its_type_and_differ_between_rows() -> None:
    ids = np.arange(1000, dtype=np.int32)
    assert torch.equal(row_uniforms(ids), row_uniforms(ids.astype(np.uint16)))
    assert float((row_uniforms(ids) - row_uniforms(ids + 1)).abs().min()) > 0
    assert float(row_uniforms(ids).mean()) == pytest.approx(0.5, abs=0.05)  # five standard deviations


def test_all_tokens_kept_give_the_exact_loss_bit_for_bit(tmp_path: Path) -> None:
    target, rows = tiny_target(), tiny_rows(tmp_path, LENGTHS)
    drafts = torch.randn(max(LENGTHS), target.vocabulary, generator=torch.Generator().manual_seed(1))
    for row in cached(tmp_path, target, rows, k=target.vocabulary, **ALONE):
        ids, log_probs = map(torch.from_numpy, row.distribution)
        stored = torch.empty_like(log_probs).scatter_(-1, ids, log_probs)
        exact = live_logits(target, row.token_ids).log_softmax(-1)
        assert torch.equal(stored, exact)
        draft = drafts[: len(exact)]
        for loss in (forward_kl, total_variation):
            assert torch.equal(
                plain(loss, draft, dense_teacher(stored.exp())), plain(loss, draft, dense_teacher(exact.exp()))
            )


@pytest.mark.parametrize("k", [1, 8, 64])
def test_kept_mass_and_kl_equal_a_direct_computation_and_mass_sums_to_one(tmp_path: Path, k: int) -> None:
    target, rows = tiny_target(), tiny_rows(tmp_path, LENGTHS)
    reader = cached(tmp_path, target, rows, k=k, **ALONE)
    masses = []
    for row in reader:
        ids, log_probs = map(torch.from_numpy, row.distribution)
        p = live_logits(target, row.token_ids).double().softmax(-1)
        draft = torch.randn(p.shape, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        order = p.argsort(-1, descending=True)
        top, rest = order[:, :k], order[:, k:]
        mass, tail = p.gather(-1, top).sum(-1), p.gather(-1, rest).sum(-1)
        q = draft.softmax(-1)
        inside = p.gather(-1, top) * (p.gather(-1, top).log() - q.gather(-1, top).log())
        direct = inside.sum(-1) + tail * (tail.log() - q.gather(-1, rest).sum(-1).log())
        teacher = Teacher(ids, log_probs.exp())
        torch.testing.assert_close(plain(forward_kl, draft.float(), teacher).double(), direct, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(teacher.p.double().sum(-1) + tail, torch.ones(len(p), dtype=torch.float64))
        masses.append(mass)
    assert cache_info(tmp_path / "cache")["kept_mass"] == pytest.approx(float(torch.cat(masses).mean()), abs=1e-6)


@pytest.mark.parametrize("codec", STATE_CODECS)
def test_self_check_names_a_flipped_tap_under_every_codec(tmp_path: Path, codec: str) -> None:
    target = tiny_target()
    cached(tmp_path, target, tiny_rows(tmp_path, LENGTHS), state_codec=codec, taps=(0, 1, 2))
    flip(tmp_path / "cache", "taps", blocks=[0, 1, 3])
    assert "taps differ" in check_against_target(tmp_path / "cache", target)[0]


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_self_check_names_another_rotation(tmp_path: Path, codec: str) -> None:
    target = tiny_target()
    cached(tmp_path, target, tiny_rows(tmp_path, LENGTHS), state_codec=codec)
    flip(tmp_path / "cache", "last", rotation=1)
    found = check_against_target(tmp_path / "cache", target)
    assert "last differ" in found[0]
    assert "logits rebuilt from last" in found[1]


@pytest.mark.parametrize("codec", STATE_CODECS)
def test_self_check_names_a_last_state_that_is_a_little_too_large(tmp_path: Path, codec: str) -> None:
    target = tiny_target()
    cached(tmp_path, target, tiny_rows(tmp_path, LENGTHS), state_codec=codec)
    part = "last.scale" if codec in ("fp8", "int8", "int4") else "last"
    spoil(tmp_path / "cache", part, lambda values: values * 1.05)
    assert "last differ" in check_against_target(tmp_path / "cache", target)[0]


@pytest.mark.parametrize(
    ("distribution", "part", "said"),
    [
        ("topk", "ids", "log-probabilities differ"),
        ("topk", "log_probs", "log-probabilities differ"),
        ("topk8", "ids", "log-probabilities differ"),
        ("topk8", "mass", "log-probabilities differ"),
        ("sampled", "ids", "log-probabilities differ"),
        ("sampled", "counts", "times off its probability"),
        ("sampled", "log_probs", "log-probabilities differ"),
    ],
)
def test_self_check_names_a_distribution_of_the_slot_before(
    tmp_path: Path, distribution: str, part: str, said: str
) -> None:
    target = tiny_target()
    cached(tmp_path, target, tiny_rows(tmp_path, LENGTHS), distribution=distribution)
    spoil(tmp_path / "cache", f"distribution.{part}", lambda values: values.roll(1, 0))
    assert said in " ".join(check_against_target(tmp_path / "cache", target))


def flip(folder: Path, field: str, **values: Any) -> None:
    """Make the manifest say something else of a field."""
    manifest = read_manifest(folder)
    fields = manifest.fields | {field: manifest.fields[field] | values}
    write_manifest(folder, manifest.model_copy(update={"fields": fields}))


def spoil(folder: Path, name: str, change: Any) -> None:
    """Change one tensor of the only shard, of the same size on disk."""
    tensors = load_file(folder / "shard-00000.safetensors")
    values = tensors[name]
    wide = values.to(torch.float32 if values.is_floating_point() else torch.int64)
    tensors[name] = change(wide).to(values.dtype)
    save_file(tensors, folder / "shard-00000.safetensors")
