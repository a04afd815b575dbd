"""What is cached equals what the target computes, whatever the batching (FAULTS 12, 13, 14, 18)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import FLAVOURS, tiny_model, tiny_rows, tiny_target, tiny_tokenizer

from draftsmith.data.cache import build
from draftsmith.data.cache.build import build_cache, cache_bytes, shard_plan
from draftsmith.data.cache.codecs import id_type, kept_kl
from draftsmith.data.cache.fields import cache_fields
from draftsmith.data.cache.manifest import CacheSettings, read_manifest, write_manifest
from draftsmith.data.cache.reader import CachedRow, CacheReader
from draftsmith.data.cache.verify import cache_info, check_against_target
from draftsmith.data.corpus import DataSettings
from draftsmith.data.rows import Row, Rows, write_rows
from draftsmith.data.tokenizer import tokenizer_digest
from draftsmith.errors import UserError
from draftsmith.models.target import Target, choose_taps

LENGTHS = (1, 200, 2, 37, 8, 120, 9, 64)
FP32 = {"distribution": "topk", "state_codec": "fp32", "k": 16, "last": True, "batch_tokens": 400, "shard_mb": 0.1}


def cached(tmp_path: Path, target: Any, rows: Rows, name: str = "cache", **options: Any) -> CacheReader:
    build_cache(target, rows, tmp_path / name, CacheSettings(**(FP32 | options)))
    return CacheReader(tmp_path / name, target.fingerprint())


@torch.inference_mode()
def live(target: Any, row: Row | CachedRow, taps: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    output = target.forward(torch.from_numpy(row.token_ids).long()[None], taps=taps)
    return torch.log_softmax(output.logits[0], -1), output.last[0], output.taps[0]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_cached_row_equals_a_live_pass_over_it_alone(tmp_path: Path, flavour: str) -> None:
    target, rows = tiny_target(flavour), tiny_rows(tmp_path, LENGTHS)
    reader = cached(tmp_path, target, rows)
    assert len(reader) == len(rows) == 8
    for row, stored in zip(rows, reader, strict=True):
        assert stored.token_ids.tolist() == row.token_ids.tolist()
        assert stored.supervised.tolist() == row.supervised.tolist()
        assert stored.domain == row.domain
        log_p, last, taps = live(target, row, reader.taps)
        np.testing.assert_allclose(stored.taps, taps, atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(stored.last, last, atol=1e-5, rtol=1e-5)
        assert stored.distribution is not None
        ids, log_probs = map(torch.from_numpy, stored.distribution)
        torch.testing.assert_close(log_probs, log_p.gather(-1, ids), atol=1e-5, rtol=0)
        torch.testing.assert_close(log_probs, log_p.topk(16).values, atol=1e-5, rtol=0)
        rebuilt = torch.log_softmax(target.head(torch.from_numpy(stored.last)), -1)
        assert float(kept_kl(log_p, rebuilt).abs().max()) < 1e-6


def test_batching_and_order_change_no_cached_token(tmp_path: Path) -> None:
    target, rows = tiny_target(), tiny_rows(tmp_path, LENGTHS)
    shuffled = [rows[i] for i in (5, 2, 7, 0, 1, 3, 6, 4)]
    write_rows(shuffled, tmp_path / "shuffled" / "train", DataSettings(), rows.tokenizer)
    one, four = (cached(tmp_path, target, rows, str(tokens), batch_tokens=tokens) for tokens in (1, 800))
    again = cached(tmp_path, target, rows, "again", batch_tokens=800)
    other = cached(tmp_path, target, Rows.open(tmp_path / "shuffled", "train"), "other", batch_tokens=800)
    for place, index in enumerate((5, 2, 7, 0, 1, 3, 6, 4)):
        for reader, where in ((four, index), (again, index), (other, place)):
            np.testing.assert_allclose(reader[where].taps, one[index].taps, atol=1e-5, rtol=1e-5)
            np.testing.assert_allclose(reader[where].last, one[index].last, atol=1e-5, rtol=1e-5)
            assert reader[where].domain == one[index].domain
    assert [s.xxh3 for s in four.manifest.shards] == [s.xxh3 for s in again.manifest.shards]


def test_logits_in_chunks_give_the_same_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rows = tiny_target(), tiny_rows(tmp_path, LENGTHS)
    whole = cached(tmp_path, target, rows)
    monkeypatch.setattr(build, "LOGITS_AT_ONCE", 7 * target.vocabulary)
    chunked = cached(tmp_path, target, rows, "chunked")
    for one, other in zip(whole, chunked, strict=True):
        np.testing.assert_allclose(one.distribution[1], other.distribution[1], atol=1e-5)


def test_long_shared_prefix_gives_equal_states_in_both_rows(tmp_path: Path) -> None:
    rows = tiny_rows(tmp_path, (100, 100))
    twins = [rows[0], rows[1]]
    twins[1].token_ids[:90] = twins[0].token_ids[:90]
    write_rows(twins, tmp_path / "twins" / "train", DataSettings(), rows.tokenizer)
    first, second = cached(tmp_path, tiny_target(), Rows.open(tmp_path / "twins", "train"))
    np.testing.assert_allclose(first.taps[:90], second.taps[:90], atol=1e-5, rtol=1e-5)
    assert np.abs(first.taps[95:] - second.taps[95:]).max() > 0.1


def test_bf16_codec_loses_only_rounding(tmp_path: Path) -> None:
    target, rows = tiny_target(), tiny_rows(tmp_path, LENGTHS)
    exact, rounded = cached(tmp_path, target, rows), cached(tmp_path, target, rows, "bf16", state_codec="bf16")
    for a, b in zip(exact, rounded, strict=True):
        assert b.taps is not None
        assert b.taps.dtype == np.float32
        np.testing.assert_allclose(b.taps, a.taps, rtol=2**-8)
        np.testing.assert_allclose(a.distribution[1], b.distribution[1], atol=1e-5)
    assert check_against_target(tmp_path / "bf16", target) == []


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_tap_k_is_the_output_of_block_k_before_the_final_norm(tmp_path: Path, blocks: int) -> None:
    """Every block is made to write its own constant, so a state shows which blocks stand before it."""
    model = tiny_model("plain", num_hidden_layers=blocks)
    for parameter in model.parameters():
        parameter.data.zero_()
    for number, block in enumerate(model.model.layers):
        block.register_forward_hook(lambda _m, _i, out, number=number: out + 10.0**number)
    target = Target(model, tiny_tokenizer(), "constants")
    fields = cache_fields(CacheSettings(taps=tuple(range(blocks)), k=4), target.width, target.vocabulary, blocks)
    shard = build._Shard(
        target, fields, [Row(np.arange(5, dtype=np.int32), np.ones(5, dtype=bool), "code", "d")], ["code"]
    )
    with torch.inference_mode():
        output = target.forward(torch.arange(5)[None], taps=tuple(range(blocks)))
        shard._store([0], output.taps, output.last)
    expected = [sum(10.0**n for n in range(k + 1)) for k in range(blocks)]  # 1, 11, 111, ...
    assert shard.tensors["taps"][0, :, 0].float().tolist() == pytest.approx(expected, rel=2**-8)


@pytest.mark.parametrize("blocks", range(1, 9))
def test_automatic_taps_are_distinct_and_exist(blocks: int) -> None:
    taps = choose_taps(blocks, "auto")
    assert list(taps) == sorted(set(taps))
    assert 0 <= taps[0] <= taps[-1] < blocks


def test_all_tokens_kept_is_the_exact_distribution_and_mass_sums_to_one(tmp_path: Path) -> None:
    target, rows = tiny_target(), tiny_rows(tmp_path, (30, 20))
    reader = cached(tmp_path, target, rows, k=target.vocabulary)
    log_p, _, _ = live(target, rows[0], reader.taps)
    ids, log_probs = map(torch.from_numpy, reader[0].distribution)
    exact = torch.empty_like(log_p).scatter_(-1, ids, log_probs)
    torch.testing.assert_close(exact, log_p, atol=1e-5, rtol=0)
    assert ids.sort(-1).values.tolist() == [list(range(target.vocabulary))] * 30
    assert reader.manifest.shards[0].kept_mass == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("k", [1, 8, 64])
def test_reported_mass_is_that_of_the_k_likeliest_tokens(tmp_path: Path, k: int) -> None:
    target, rows = tiny_target(), tiny_rows(tmp_path, (30, 50))
    reader = cached(tmp_path, target, rows, k=k)
    kept = torch.cat([live(target, row, (0,))[0].topk(k).values.exp().sum(-1) for row in rows])
    assert cache_info(tmp_path / "cache")["kept_mass"] == pytest.approx(float(kept.mean()), abs=1e-6)
    assert reader[0].distribution[0].shape == (30, k)


def test_ids_take_the_smallest_unsigned_type() -> None:
    assert [id_type(v) for v in (256, 257, 65536, 65537)] == [torch.uint8, torch.uint16, torch.uint16, torch.uint32]


def test_kl_over_kept_tokens_and_the_rest_equals_its_closed_form() -> None:
    p, q = torch.tensor([[0.5, 0.3]]), torch.tensor([[0.25, 0.25]])
    expected = 0.5 * np.log(2) + 0.3 * np.log(1.2) + 0.2 * np.log(0.2 / 0.5)
    assert float(kept_kl(p.log(), q.log())) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("options", [{}, {"state_codec": "bf16", "last": False, "k": 64}, {"taps": "none"}])
def test_predicted_size_is_within_five_percent(tmp_path: Path, options: dict[str, Any]) -> None:
    target, rows = tiny_target(), tiny_rows(tmp_path, [100] * 40)
    cached(tmp_path, target, rows, **options)
    real = sum(path.stat().st_size for path in (tmp_path / "cache").glob("shard-*"))
    predicted = cache_bytes(
        CacheSettings(**(FP32 | options)),
        lengths=rows.lengths,
        shared=rows.shared,
        width=target.width,
        vocabulary=target.vocabulary,
        blocks=target.blocks,
    )
    assert predicted == pytest.approx(real, rel=0.05)


def test_shards_take_rows_in_order_and_one_row_always_fits() -> None:
    assert shard_plan(np.array([3, 3, 3, 50, 1]), np.zeros(5, int), 60, 10) == [(0, 2), (2, 3), (3, 4), (4, 5)]


def test_rows_beyond_the_cap_are_not_cached(tmp_path: Path) -> None:
    rows = tiny_rows(tmp_path, (30, 30, 30))
    summary = build_cache(tiny_target(), rows, tmp_path / "cache", CacheSettings(**FP32), train_tokens=65)
    assert (summary["rows"], summary["tokens"], summary["written_shards"]) == (2, 60, 1)
    assert len(CacheReader(tmp_path / "cache")) == 2


def test_a_cache_takes_more_domains_than_a_byte_counts(tmp_path: Path) -> None:
    target = tiny_target()
    rows = [row._replace(domain=f"d{index:03d}") for index, row in enumerate(tiny_rows(tmp_path, [2] * 300))]
    write_rows(rows, tmp_path / "many" / "train", DataSettings(), tokenizer_digest(target.tokenizer))
    reader = cached(tmp_path, target, Rows.open(tmp_path / "many", "train"))
    assert [reader.domain(index) for index in range(300)] == [row.domain for row in rows]


def test_cache_without_taps_serves_a_draft_lm(tmp_path: Path) -> None:
    reader = cached(tmp_path, tiny_target(), tiny_rows(tmp_path, (9,)), taps="none", last=False)
    assert reader[0].taps is None
    assert reader[0].last is None
    assert reader.taps == ()


def flip(folder: Path, field: str, **values: Any) -> None:
    manifest = read_manifest(folder)
    fields = manifest.fields | {field: manifest.fields[field] | values}
    write_manifest(folder, manifest.model_copy(update={"fields": fields}))


@pytest.mark.parametrize("flavour", ["plain", "gemma2", "mistral-window"])
def test_self_check_passes_on_a_true_cache_and_names_a_flipped_tap(tmp_path: Path, flavour: str) -> None:
    target = tiny_target(flavour)
    cached(tmp_path, target, tiny_rows(tmp_path, LENGTHS), taps=(0, 1, 2))
    assert check_against_target(tmp_path / "cache", target) == []
    flip(tmp_path / "cache", "taps", blocks=[0, 1, 3])
    found = check_against_target(tmp_path / "cache", target)
    assert len(found) == len(read_manifest(tmp_path / "cache").shards)
    assert "taps differ" in found[0]


def test_flipped_convention_is_refused_by_name(tmp_path: Path) -> None:
    cached(tmp_path, tiny_target(), tiny_rows(tmp_path, (9,)))
    manifest = read_manifest(tmp_path / "cache")
    write_manifest(
        tmp_path / "cache",
        manifest.model_copy(update={"conventions": manifest.conventions | {"last": "before the final norm"}}),
    )
    with pytest.raises(UserError, match=r"conventions\.last is 'before the final norm'"):
        CacheReader(tmp_path / "cache")


@pytest.mark.parametrize("fault", ["last before the norm", "shifted distribution", "wrong block"])
def test_building_under_a_wrong_convention_fails_loudly(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: Any, batch: list[int], taps: torch.Tensor, last: torch.Tensor) -> None:
        store(self, batch, taps.roll(1, 2) if fault == "wrong block" else taps, last)
        if fault == "last before the norm":
            self.tensors["last"] *= 1.05
        elif fault == "shifted distribution":
            for name in ("distribution.ids", "distribution.log_probs"):
                self.tensors[name] = self.tensors[name].to(torch.float32).roll(1, 0).to(self.tensors[name].dtype)

    store = build._Shard._store
    monkeypatch.setattr(build._Shard, "_store", wrong)
    with pytest.raises(RuntimeError, match="self-check failed"):
        build_cache(tiny_target(), tiny_rows(tmp_path, (20,)), tmp_path / "cache", CacheSettings(**FP32))
    assert not list((tmp_path / "cache").glob("shard-*"))


def test_target_that_computes_nan_is_named_with_its_document(tmp_path: Path) -> None:
    target = tiny_target()
    target.model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(UserError, match="last are not finite in document document-0"):
        build_cache(target, tiny_rows(tmp_path, (5,)), tmp_path / "cache", CacheSettings(**FP32))
