"""Rows of one conversation store their common prefix once and read as if they did not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import tiny_model, tiny_rows, tiny_target
from safetensors.torch import load_file
from templates import CHATML, family_tokenizer
from torch.utils.data import DataLoader

from draftsmith.data.cache import writer
from draftsmith.data.cache.build import build_cache, cache_bytes, shard_plan
from draftsmith.data.cache.codecs import STATE_CODECS
from draftsmith.data.cache.fields import bytes_per_token, row_bytes_per_token, row_uniforms
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.data.cache.online import OnlineRows
from draftsmith.data.cache.reader import CachedRow, CacheReader
from draftsmith.data.cache.verify import cache_info, check_against_target
from draftsmith.data.corpus import DataSettings, Source
from draftsmith.data.prepare import prepare
from draftsmith.data.rows import Row, Rows, write_rows
from draftsmith.models.target import Target

SETTINGS = {"distribution": "topk", "state_codec": "fp32", "k": 8, "last": True, "batch_tokens": 300}
POISON = 5  # a token that no random row has


def conversations(folder: Path) -> tuple[Target, Rows]:
    """Six chats of three answers, whose template shows reasoning in the answer that comes last only: a row for each answer."""
    tokenizer = family_tokenizer(CHATML)
    chats = []
    for number in range(6):
        turns = [(f"what is {number}{turn}?", f"<think>add {turn}</think>it is {number + turn}") for turn in range(3)]
        roles = (
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        )
        chats.append({"messages": list(roles)})
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    source = Source(kind="json", path=str(folder / "chats.jsonl"))
    prepare(DataSettings(sources=(source,), max_length=250, held_out=0.2), tokenizer, folder / "rows")
    target = Target(tiny_model(vocabulary=len(tokenizer)), tokenizer, "chat")
    return target, Rows.open(folder / "rows", "train")


def apart(rows: Rows, folder: Path) -> Rows:
    """The same rows, each of a document of its own: they share nothing."""
    renamed = [row._replace(document=str(number)) for number, row in enumerate(rows)]
    write_rows(renamed, folder / "apart" / "train", DataSettings(), rows.tokenizer)
    return Rows.open(folder / "apart", "train")


def branching(folder: Path, lengths: tuple[int, ...], shared: tuple[int, ...]) -> Rows:
    """Random rows of one document; of each the first tokens are those of the row before it."""
    rows = [row._replace(document="one", domain="chat") for row in tiny_rows(folder, lengths)]
    for before, row, count in zip(rows, rows[1:], shared[1:], strict=False):
        row.token_ids[:count] = before.token_ids[:count]
        if count < len(before.token_ids):
            row.token_ids[count] = 6 + (before.token_ids[count] - 5) % 100  # another one
    write_rows(rows, folder / "branching" / "train", DataSettings(), Rows.open(folder / "rows", "train").tokenizer)
    return Rows.open(folder / "branching", "train")


def cached(folder: Path, target: Target, rows: Rows, **options: Any) -> CacheReader:
    build_cache(target, rows, folder, CacheSettings(**(SETTINGS | options)))
    return CacheReader(folder, target.fingerprint())


def stored(folder: Path) -> int:
    return sum(tensor.nbytes for path in folder.glob("shard-*") for tensor in load_file(path).values())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def assert_equal(ours: CachedRow, theirs: CachedRow) -> None:
    for name in ("token_ids", "supervised", "taps", "last"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(ours.distribution[1], theirs.distribution[1], atol=1e-5)
    assert ours.domain == theirs.domain


def test_a_fanned_out_conversation_reads_as_without_sharing_and_takes_less_by_what_is_shared(tmp_path: Path) -> None:
    target, rows = conversations(tmp_path)
    assert np.count_nonzero(rows.shared) == 2 * len(rows) // 3  # the second and third row of each conversation
    assert rows.shared.sum() > 0.3 * rows.tokens
    shared = cached(tmp_path / "shared", target, rows)
    whole = cached(tmp_path / "whole", target, apart(rows, tmp_path))
    assert [row.supervised.tolist() for row in shared] == [row.supervised.tolist() for row in rows]
    for index in np.random.default_rng(0).permutation(len(rows)):
        assert_equal(shared[index], whole[index])
        assert [part.tolist() for part in shared.tokens(index)] == [part.tolist() for part in whole.tokens(index)]
    assert torch.equal(shared.batch([5, 0]).lengths, whole.batch([5, 0]).lengths)
    for row, same in zip(shared, DataLoader(shared, batch_size=None, num_workers=2), strict=True):
        np.testing.assert_array_equal(same.taps, row.taps)
    fields = shared.manifest.fields
    saved = int(rows.shared.sum()) * (bytes_per_token(fields) - row_bytes_per_token(fields))
    assert stored(tmp_path / "whole") - stored(tmp_path / "shared") == saved
    about = {name: cache_info(tmp_path / name) for name in ("shared", "whole")}
    assert about["shared"]["tokens"] == about["whole"]["tokens"] == rows.tokens
    assert about["shared"]["kept_mass"] == pytest.approx(about["whole"]["kept_mass"], abs=1e-6)
    assert about["shared"]["kept_mass"] < 0.99
    assert check_against_target(tmp_path / "shared", target) == []


@pytest.mark.parametrize(
    "codecs", [("bf16", "topk8"), ("fp8", "sampled"), ("int8", "from_last"), ("int4", "topk")], ids="-".join
)
def test_chains_of_rows_are_put_together_whatever_the_codec(tmp_path: Path, codecs: tuple[str, str]) -> None:
    rows = branching(tmp_path, (60, 70, 50, 40, 90), (0, 50, 30, 39, 40))
    assert rows.shared.tolist() == [0, 50, 30, 39, 40]
    target, options = tiny_target(), {"state_codec": codecs[0], "distribution": codecs[1]}
    reader = cached(tmp_path / "cache", target, rows, **options)
    assert reader.verify() == check_against_target(tmp_path / "cache", target) == []
    assert [len(row.taps) for row in reader] == [60, 70, 50, 40, 90]
    tensors = load_file(tmp_path / "cache" / "shard-00000.safetensors")
    assert (len(tensors["token_ids"]), len(tensors["taps"])) == (310, 310 - 159)
    online = OnlineRows(target, rows, CacheSettings(**(SETTINGS | options)))
    for index in (4, 2, 0, 3, 1):
        ours, theirs = reader[index].distribution, online[index].distribution
        if codecs[1] != "from_last":  # the draws too are those of the row alone
            assert (ours[0] == theirs[0]).mean() > 0.999
        error = np.linalg.norm(reader[index].taps - online[index].taps, axis=-1)
        assert (error / np.linalg.norm(online[index].taps, axis=-1)).max() < STATE_CODECS[codecs[0]].tolerance


# lengths, shared with the row before, which rows are spoilt from where on, and what then is stored of the shared prefixes
DROPS = {
    "behind the prefix": ((60, 70, 80, 60), (0, 20, 50, 45), {1: 55}, [0, 20, 45]),
    "in the prefix": ((60, 70, 80, 60, 90, 90, 90), (0, 30, 50, 45, 0, 0, 0), {1: 25, 2: 25, 3: 25}, [0, 0, 0, 0]),
    "between two that share": ((60, 70, 60), (0, 60, 25), {1: 20}, [0, 25]),
}


@pytest.mark.parametrize("case", DROPS)
def test_a_row_is_whole_when_the_row_that_stored_its_prefix_is_dropped(tmp_path: Path, case: str) -> None:
    lengths, shared, spoilt, then = DROPS[case]
    rows = list(branching(tmp_path, lengths, shared))
    for index, place in spoilt.items():
        rows[index].token_ids[place] = POISON
    write_rows(rows, tmp_path / "poisoned" / "train", DataSettings(), Rows.open(tmp_path / "rows", "train").tokenizer)
    target = tiny_target()
    target.model.get_input_embeddings().weight.data[POISON] = float("nan")
    poisoned = Rows.open(tmp_path / "poisoned", "train")
    reader = cached(tmp_path / "cache", target, poisoned)
    assert reader.manifest.shards[0].dropped == tuple(spoilt)
    for row, found in zip((row for row in poisoned if POISON not in row.token_ids), reader, strict=True):
        assert found.token_ids.tolist() == row.token_ids.tolist()
        with torch.inference_mode():
            live = target.forward(torch.from_numpy(row.token_ids).long()[None], taps=reader.taps)
        np.testing.assert_allclose(found.taps, live.taps[0], atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(found.last, live.last[0], atol=1e-5, rtol=1e-5)
    tensors = load_file(tmp_path / "cache" / "shard-00000.safetensors")
    assert tensors["shared"].tolist() == then
    assert len(tensors["taps"]) == len(tensors["token_ids"]) - sum(then)


def test_interrupted_and_damaged_caches_end_in_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rows = conversations(tmp_path)
    small = {"shard_mb": 0.1}
    cached(tmp_path / "whole", target, rows, **small)
    whole, real = contents(tmp_path / "whole"), writer.write_shard
    assert len(whole) > 3
    plan = [shard.rows for shard in CacheReader(tmp_path / "whole").manifest.shards]
    assert all(count % 3 == 0 for count in plan)  # conversations stay together

    def dies(tensors: Any, path: Path) -> str:
        if list((tmp_path / "cache").glob("shard-*")):
            raise ZeroDivisionError
        return real(tensors, path)

    monkeypatch.setattr(writer, "write_shard", dies)
    with pytest.raises(ZeroDivisionError):
        cached(tmp_path / "cache", target, rows, **small)
    monkeypatch.setattr(writer, "write_shard", real)
    (tmp_path / "cache" / "shard-00000.safetensors").write_bytes(b"damaged")
    cached(tmp_path / "cache", target, rows, **small)
    assert contents(tmp_path / "cache") == whole


@pytest.mark.parametrize("shard_mb", [0.05, 0.2, 5])
def test_predicted_size_is_within_five_percent(tmp_path: Path, shard_mb: float) -> None:
    target = tiny_target()
    rows = branching(tmp_path, (100,) * 30, (0,) + (80,) * 29)
    cached(tmp_path / "cache", target, rows, shard_mb=shard_mb)
    shape = {"width": target.width, "vocabulary": target.vocabulary, "blocks": target.blocks}
    settings = CacheSettings(**(SETTINGS | {"shard_mb": shard_mb}))
    predicted = cache_bytes(settings, lengths=rows.lengths, shared=rows.shared, **shape)
    real = sum(path.stat().st_size for path in (tmp_path / "cache").glob("shard-*"))
    assert predicted == pytest.approx(real, rel=0.05)
    assert real < 0.5 * cache_bytes(settings, lengths=rows.lengths, shared=0 * rows.shared, **shape)


def test_rows_that_share_stay_in_a_shard_until_it_is_four_times_full() -> None:
    lengths, shared = np.full(8, 10), np.array([0, 0, 8, 8, 8, 0, 9, 9])
    assert shard_plan(lengths, shared, 10, 1) == [(0, 1), (1, 5), (5, 8)]
    assert shard_plan(np.full(20, 10), np.full(20, 8), 5, 1) == [(0, 6), (6, 12), (12, 18), (18, 20)]


def test_only_long_prefixes_of_neighbours_of_one_document_are_shared(tmp_path: Path) -> None:
    ids = np.arange(6, 66, dtype=np.int32)

    def row(document: str, same: int, length: int = 50) -> Row:
        own = np.concatenate([ids[:same], np.full(length - same, 7 + same % 3, dtype=np.int32)])
        return Row(own, own > 0, "chat", document)

    rows = [row("a", 50), row("a", 15), row("a", 16), row("b", 16), row("b", 40), row("b", 30, 30), row("b", 30, 50)]
    write_rows(rows, tmp_path / "train", DataSettings(), "tokenizer")
    # The sixth row is a piece of the fifth: it keeps its last token. The seventh has all of the sixth.
    assert Rows.open(tmp_path, "train").shared.tolist() == [0, 0, 0, 0, 16, 29, 30]


def test_numbers_to_draw_with_depend_on_the_tokens_up_to_their_own_alone() -> None:
    ids = np.array([5, 7, 7, 9, 5, 7], dtype=np.int32)
    other = np.where(np.arange(6) < 4, ids, 8)
    ours, theirs = row_uniforms(ids), row_uniforms(other)
    assert torch.equal(ours[:4], theirs[:4])
    assert not bool((ours[4:] == theirs[4:]).any())
    assert len({*ours.tolist(), *row_uniforms(ids[1:]).tolist()}) == 11
