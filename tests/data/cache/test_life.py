"""The life of a cache folder: crash, resume, damage, refusal, full disk (FAULTS 15, 16, 17, 19)."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit import in_twos, tiny_rows, tiny_target
from safetensors.torch import load_file, save_file

from draftsmith.data.cache import build, writer
from draftsmith.data.cache import reader as reader_module
from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.manifest import CacheSettings, read_manifest, remove_unreadable, write_manifest
from draftsmith.data.cache.reader import CacheReader
from draftsmith.data.cache.verify import verify_cache
from draftsmith.data.corpus import DataSettings
from draftsmith.data.rows import Rows, write_rows
from draftsmith.errors import UserError

SETTINGS = {"distribution": "topk", "k": 8, "batch_tokens": 100, "shard_mb": 0.01}  # about 40 tokens a shard
LENGTHS = [30] * 5


def make(tmp_path: Path, seed: int = 0, data_seed: int = 0, name: str = "cache", **options: Any) -> dict[str, Any]:
    rows = tiny_rows(tmp_path, LENGTHS, seed=data_seed)
    return build_cache(tiny_target(seed=seed), rows, tmp_path / name, CacheSettings(**(SETTINGS | options)))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*"))}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: list[Callable[[Path], None]] = [truncate, flip, empty, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shard_is_named_and_resume_rebuilds_just_that_one(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    make(tmp_path)
    whole = contents(tmp_path / "cache")
    assert verify_cache(tmp_path / "cache") == []
    damage(tmp_path / "cache" / "shard-00002.safetensors")
    (found,) = verify_cache(tmp_path / "cache")
    assert found.startswith("shard-00002.safetensors: ")
    summary = make(tmp_path)
    assert (summary["written_shards"], summary["rebuilt"]) == (1, [found])
    assert contents(tmp_path / "cache") == whole


@pytest.mark.parametrize("damage", [truncate, empty, Path.unlink])
def test_reader_refuses_a_shard_of_the_wrong_size(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    make(tmp_path)
    damage(tmp_path / "cache" / "shard-00001.safetensors")
    with pytest.raises(UserError, match=r"shard-00001.safetensors: .*cache-repair"):
        CacheReader(tmp_path / "cache")


@pytest.mark.parametrize("damage", [truncate, empty, flip])
def test_a_shard_that_changes_after_it_was_opened_is_refused_and_kills_nothing(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """To read behind the end of a mapped file is a SIGBUS, which no process outlives or explains."""
    make(tmp_path)
    path = tmp_path / "cache" / read_manifest(tmp_path / "cache").shards[-1].name
    os.utime(path, ns=(0, 0))  # clocks of file systems are coarse
    reader = CacheReader(tmp_path / "cache")
    assert reader[-1].token_ids.any()
    damage(path)
    with pytest.raises(UserError, match=f"{path.name}: changed since it was opened; run `draftsmith cache-repair"):
        reader[-1]
    assert reader[0].token_ids.any()


def test_flipped_byte_is_found_by_the_readers_verify(tmp_path: Path) -> None:
    make(tmp_path)
    flip(tmp_path / "cache" / "shard-00001.safetensors")
    assert [line.split(":")[0] for line in CacheReader(tmp_path / "cache").verify()] == ["shard-00001.safetensors"]


def _killed(folder: Path, after: int) -> None:
    """Build until `after` shards are published, then die in the middle of writing the next."""
    import torch

    torch.set_num_threads(1)  # a forked child must not wait for its parent's threads
    real = writer.write_shard

    def write(tensors: Any, path: Path) -> str:
        if len(list((folder / "cache").glob("shard-*"))) == after:
            Path(path).write_bytes(b"half a shard")
            os.kill(os.getpid(), signal.SIGKILL)
        return real(tensors, path)

    writer.write_shard = write
    make(folder)


@pytest.mark.parametrize("after", [0, 2])
def test_kill_in_mid_shard_loses_that_shard_only_and_resume_ends_in_the_same_bytes(tmp_path: Path, after: int) -> None:
    make(tmp_path, name="whole")
    child = multiprocessing.get_context("fork").Process(target=_killed, args=(tmp_path, after))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert len(read_manifest(tmp_path / "cache").shards) == after
    assert list((tmp_path / "cache").glob(".*.tmp"))
    with pytest.raises(UserError, match="empty" if after == 0 else "rows are missing"):
        CacheReader(tmp_path / "cache")
    assert make(tmp_path)["written_shards"] == 5 - after
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")


def _build_many(folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    rows = Rows.open(folder / "rows", "train")
    build_cache(tiny_target(), rows, folder / "cache", CacheSettings(**SETTINGS))


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.long)])
def test_kills_at_random_moments_change_no_byte(tmp_path: Path, kills: int) -> None:
    rows = in_twos(tiny_rows(tmp_path, [30] * 60))
    assert np.count_nonzero(rows.shared) == 30
    build_cache(tiny_target(), rows, tmp_path / "whole", CacheSettings(**SETTINGS))
    whole, rng = len(list((tmp_path / "whole").glob("shard-*"))), np.random.default_rng(kills)
    assert whole > kills + 4
    # By how far the work is, and a random moment after that: a slow machine must not come to its end before the kill.
    for reached in np.sort(rng.choice(whole - 4, kills, replace=False)):
        child = multiprocessing.get_context("fork").Process(target=_build_many, args=(tmp_path,))
        child.start()
        while child.is_alive() and len(list((tmp_path / "cache").glob("shard-*"))) < reached:
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.004))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        if (tmp_path / "cache" / "manifest.json").exists():
            assert not [
                found for found in verify_cache(tmp_path / "cache") if "shard" in found and "not part" not in found
            ]
    build_cache(tiny_target(), rows, tmp_path / "cache", CacheSettings(**SETTINGS))
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")


def test_kill_between_a_shard_and_its_entry_repeats_that_shard(tmp_path: Path) -> None:
    make(tmp_path)
    whole = contents(tmp_path / "cache")
    manifest = read_manifest(tmp_path / "cache")
    write_manifest(tmp_path / "cache", manifest.model_copy(update={"shards": manifest.shards[:-1]}))
    assert make(tmp_path)["written_shards"] == 1
    assert contents(tmp_path / "cache") == whole


def test_complete_cache_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    monkeypatch.setattr(build._Shard, "compute", None)
    assert make(tmp_path)["written_shards"] == 0


def test_moved_cache_is_the_same_cache(tmp_path: Path) -> None:
    make(tmp_path)
    shutil.move(tmp_path / "cache", tmp_path / "moved")
    assert make(tmp_path, name="moved")["written_shards"] == 0
    assert len(CacheReader(tmp_path / "moved", tiny_target().fingerprint())) == 5


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": 1}, "target"),
        ({"data_seed": 1}, "data.digest"),
        ({"k": 9}, "fields.distribution.k"),
        ({"taps": (0, 1)}, "fields.taps.blocks"),
        ({"state_codec": "fp32"}, "fields.taps.codec"),
        ({"last": True}, "fields.last"),
        ({"shard_mb": 0.02}, "shard_mb"),
    ],
)
def test_resume_with_another_setting_is_refused_by_name(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    make(tmp_path)
    before = contents(tmp_path / "cache")
    with pytest.raises(UserError, match=f"begun with {named}"):
        make(tmp_path, **options)
    assert contents(tmp_path / "cache") == before


@pytest.mark.parametrize("setting", ["seed", "max_length"])
def test_resume_with_other_data_settings_is_refused_by_name(tmp_path: Path, setting: str) -> None:
    make(tmp_path)
    rows = tiny_rows(tmp_path, LENGTHS)
    some = [rows[index] for index in range(4)]
    write_rows(some, tmp_path / "other" / "train", DataSettings(**{setting: 99}), rows.tokenizer)
    with pytest.raises(UserError, match=f"begun with data.settings.{setting} = .*, now it is 99"):
        build_cache(
            tiny_target(), Rows.open(tmp_path / "other", "train"), tmp_path / "cache", CacheSettings(**SETTINGS)
        )


def test_batching_may_change_between_two_runs(tmp_path: Path) -> None:
    make(tmp_path)
    assert make(tmp_path, batch_tokens=33)["written_shards"] == 0


def test_reader_refuses_another_target(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(UserError, match="made from target"):
        CacheReader(tmp_path / "cache", tiny_target(seed=1).fingerprint())


def test_rows_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    rows = tiny_rows(tmp_path, LENGTHS)
    rows.tokenizer = "another"
    with pytest.raises(UserError, match="another tokenizer"):
        build_cache(tiny_target(), rows, tmp_path / "cache", CacheSettings(**SETTINGS))


def test_rows_longer_than_the_context_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="257 tokens, the target's context is 256"):
        build_cache(tiny_target(), tiny_rows(tmp_path, [257]), tmp_path / "cache", CacheSettings(**SETTINGS))


def test_more_kept_tokens_than_the_vocabulary_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="151 tokens of a vocabulary of 150"):
        make(tmp_path, k=151)


def test_full_disk_stops_cleanly_and_the_cache_is_resumable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, name="whole")

    real = writer.write_shard

    def full(tensors: Any, path: Path) -> str:
        if len(list((tmp_path / "cache").glob("shard-*"))) == 2:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_shard", full)
        with pytest.raises(UserError, match="disk is full; 2 shards are complete"):
            make(tmp_path)
    assert not list((tmp_path / "cache").glob(".*.tmp"))
    assert make(tmp_path)["written_shards"] == 3
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")


@contextmanager
def small_disk(place: Path, options: str) -> Iterator[None]:
    """A file system of its own at `place`; needs a root that may mount."""
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_really_full_disk_stops_cleanly_and_the_cache_is_resumable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, name="whole")
    monkeypatch.setattr(build, "_check_space", lambda *_: None)  # the space goes while the cache is written
    with small_disk(tmp_path / "disk", "size=28k"):
        with pytest.raises(UserError, match=r"disk is full; [0-4] shards are complete"):
            make(tmp_path, name="disk/cache")
        assert not list((tmp_path / "disk" / "cache").glob(".*.tmp"))
        subprocess.run(["mount", "-o", "remount,size=1m", str(tmp_path / "disk")], check=True)
        make(tmp_path, name="disk/cache")
        assert contents(tmp_path / "disk" / "cache") == contents(tmp_path / "whole")


def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", "ro"),
        pytest.raises(UserError, match=r"disk/cache: cannot be written \(Read-only file system\)"),
    ):
        make(tmp_path, name="disk/cache")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_may_not_be_written_is_named(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_tensors: Any, path: Path) -> str:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(writer, "write_shard", refuse)
    with pytest.raises(UserError, match="cannot be written") as caught:
        make(tmp_path)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert make(tmp_path)["written_shards"] == 5


def test_stray_files_are_named_and_change_nothing(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "cache" / ".shard-00009.safetensors.x.tmp").write_bytes(b"half")
    (tmp_path / "cache" / "notes.txt").write_text("mine")
    assert [line.split(":")[0] for line in verify_cache(tmp_path / "cache")] == [
        ".shard-00009.safetensors.x.tmp",
        "notes.txt",
    ]
    assert make(tmp_path)["written_shards"] == 0
    assert sorted(path.name for path in (tmp_path / "cache").glob("[.n]*")) == ["notes.txt"]


@pytest.mark.parametrize("name", ["../shard-00000.safetensors", "/etc/passwd", "shard-00000.safetensors/..", "x"])
def test_a_manifest_cannot_point_out_of_its_folder(tmp_path: Path, name: str) -> None:
    make(tmp_path)
    path = tmp_path / "cache" / "manifest.json"
    values = json.loads(path.read_text().replace("shard-00001.safetensors", name))
    path.write_text(json.dumps({key: value for key, value in values.items() if key != "digest"}))
    with pytest.raises(UserError, match=r"field shards\.1\.name") as caught:
        CacheReader(tmp_path / "cache")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("rows", 7), ("kept_mass", 0.5), ("dropped", [3])])
def test_a_manifest_with_another_number_is_named_and_made_again_by_repair(tmp_path: Path, key: str, value: Any) -> None:
    make(tmp_path)
    whole = contents(tmp_path / "cache")
    path = tmp_path / "cache" / "manifest.json"
    values = json.loads(path.read_text())
    values["shards"][1][key] = value
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"does not have its own digest; run `draftsmith cache-repair CONFIG`"):
        CacheReader(tmp_path / "cache")
    assert "own digest" in str(remove_unreadable(tmp_path / "cache"))
    make(tmp_path)
    assert contents(tmp_path / "cache") == whole


@pytest.mark.parametrize("half", [b"", b'{"schema_version": 2, "tar', b"\xff\xfe\x00"])
def test_half_a_manifest_is_named_and_removed_by_repair(tmp_path: Path, half: bytes) -> None:
    make(tmp_path)
    whole = contents(tmp_path / "cache")
    path = tmp_path / "cache" / "manifest.json"
    path.write_bytes(half)
    with pytest.raises(UserError, match=r"not JSON .* run `draftsmith cache-repair CONFIG`"):
        make(tmp_path)
    assert "not JSON" in str(remove_unreadable(tmp_path / "cache"))
    assert make(tmp_path)["written_shards"] == 5
    assert contents(tmp_path / "cache") == whole
    assert remove_unreadable(tmp_path / "cache") is None


def test_an_error_of_the_writer_thread_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_tensors: Any, _path: Path) -> str:
        raise ZeroDivisionError("in the thread")

    monkeypatch.setattr(writer, "write_shard", broken)
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError, match="in the thread"):
        make(tmp_path)
    assert set(threading.enumerate()) <= before


def test_a_shard_is_written_while_the_next_is_computed_and_no_third_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, overlapped, ahead = threading.Event(), [], []
    begun, compute, write = [0, 0], build._Shard.compute, writer.write_shard

    def counted(self: Any, *arguments: Any) -> Any:
        begun[0] += 1
        ahead.append(begun[0] - begun[1])
        if begun[0] == 2:
            second.set()
        return compute(self, *arguments)

    def slow(tensors: Any, path: Path) -> str:
        overlapped.append(second.wait(20))  # in vain where the second shard waits for the first to be written
        begun[1] += 1
        return write(tensors, path)

    monkeypatch.setattr(build._Shard, "compute", counted)
    monkeypatch.setattr(writer, "write_shard", slow)
    make(tmp_path)
    assert overlapped == [True] * 5
    assert max(ahead) == 2  # one is computed, one is written


def test_too_small_a_disk_is_refused_before_the_first_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(build.shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(UserError, match="GB are free"):
        make(tmp_path)


def test_renamed_field_is_named(tmp_path: Path) -> None:
    make(tmp_path)
    path = tmp_path / "cache" / "shard-00003.safetensors"
    tensors = load_file(path)
    tensors["tapz"] = tensors.pop("taps")
    save_file(tensors, path)
    with pytest.raises(UserError, match=r"shard-00003\.safetensors lacks field taps"):
        CacheReader(tmp_path / "cache")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no cache here"),
        ("{", "not JSON"),
        ("[]", "schema_version None"),
        ('{"schema_version": 99}', "schema_version 99"),
        ('{"schema_version": 2}', "field target"),
    ],
)
def test_unusable_manifest_is_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        CacheReader(tmp_path)
    assert "\n" not in str(caught.value)


def test_unknown_codec_is_named(tmp_path: Path) -> None:
    make(tmp_path)
    manifest = read_manifest(tmp_path / "cache")
    fields = manifest.fields | {"taps": manifest.fields["taps"] | {"codec": "int3"}}
    write_manifest(tmp_path / "cache", manifest.model_copy(update={"fields": fields}))
    with pytest.raises(UserError, match="taps has unknown codec 'int3'"):
        CacheReader(tmp_path / "cache")


def test_reader_travels_to_worker_processes(tmp_path: Path) -> None:
    import pickle

    make(tmp_path)
    reader = CacheReader(tmp_path / "cache")
    copy = pickle.loads(pickle.dumps(reader))
    np.testing.assert_array_equal(copy[3].taps, reader[3].taps)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_loader_workers_read_the_rows_of_the_reader(tmp_path: Path, start: str) -> None:
    from torch.utils.data import DataLoader

    make(tmp_path)
    reader = CacheReader(tmp_path / "cache")
    workers = 2 if start == "fork" else 1
    loader = DataLoader(reader, batch_size=None, num_workers=workers, multiprocessing_context=start)
    for ours, theirs in zip(loader, reader, strict=True):
        np.testing.assert_array_equal(ours.taps, theirs.taps)
        assert ours.domain == theirs.domain


def test_reading_many_shards_keeps_few_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "OPEN_SHARDS", 2)
    make(tmp_path)
    reader = CacheReader(tmp_path / "cache")
    once = [row.taps.copy() for row in reader]
    assert len(reader._handles) == 2
    for index in (4, 0, 3, 1, 2):
        np.testing.assert_array_equal(reader[index].taps, once[index])
