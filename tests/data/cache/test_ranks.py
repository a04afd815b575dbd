"""Several ranks share out the shards of one cache, and the result is that of one (FAULTS 20)."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from kit import in_twos, tiny_rows, tiny_target, tiny_tokenizer

from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.manifest import CacheSettings, read_manifest
from draftsmith.data.cache.reader import CacheReader
from draftsmith.data.cache.verify import verify_cache
from draftsmith.data.corpus import DataSettings
from draftsmith.data.rows import Rows, write_rows
from draftsmith.data.tokenizer import tokenizer_digest
from draftsmith.errors import UserError

SETTINGS = CacheSettings(distribution="topk", k=8, batch_tokens=100, shard_mb=0.01)  # about 40 tokens a shard
POISON = 5  # a token that no random row has


def poisoned_target() -> object:
    """A target that computes NaN for every row in which the token POISON stands."""
    target = tiny_target()
    target.model.get_input_embeddings().weight.data[POISON] = float("nan")
    return target


def rows_with_poison(folder: Path, every: int) -> Rows:
    rows = list(in_twos(tiny_rows(folder / "plain", [20 + i % 9 for i in range(20)])))
    for row in rows[3 % every :: every]:
        row.token_ids[7] = POISON
    write_rows(rows, folder / "train", DataSettings(), tokenizer_digest(tiny_tokenizer()))
    return Rows.open(folder, "train")


def as_rank(folder: Path) -> None:
    """What each of the launched processes does."""
    torch.set_num_threads(1)
    build_cache(poisoned_target(), Rows.open(folder / "tenth", "train"), folder / "tenth-by-two", SETTINGS)
    print("tenth done", flush=True)
    started = time.monotonic()
    try:
        build_cache(poisoned_target(), Rows.open(folder / "all", "train"), folder / "all-by-two", SETTINGS)
    except UserError as error:
        print(error, flush=True)
        print(f"stopped after {time.monotonic() - started:.1f} s", flush=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def launch(folder: Path, count: int) -> list[str]:
    """The output of `count` processes, each a rank. The time that they may take is that of starting them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_ranks, pathlib; test_ranks.as_rank(pathlib.Path(sys.argv[1]))"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder)],
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "PYTHONPATH": path}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        return [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()


def test_two_ranks_write_the_bytes_of_one_count_failing_rows_and_stop_when_all_fail(tmp_path: Path) -> None:
    rows = rows_with_poison(tmp_path / "tenth", every=10)
    assert rows.shared.any()
    rows_with_poison(tmp_path / "all", every=1)
    about = build_cache(poisoned_target(), rows, tmp_path / "tenth-by-one", SETTINGS)
    assert about["dropped_rows"] == 2
    outputs = launch(tmp_path, 2)
    for output in outputs:
        assert "tenth done" in output, output
        assert "rows failed: the target's taps are not finite in document" in output, output
        (seconds,) = re.findall(r"stopped after (\S+) s", output)
        assert float(seconds) < 30, output
    assert contents(tmp_path / "tenth-by-two") == contents(tmp_path / "tenth-by-one")
    assert [shard.dropped for shard in read_manifest(tmp_path / "tenth-by-two").shards if shard.dropped] == [
        (3,),
        (13,),
    ]
    assert verify_cache(tmp_path / "tenth-by-two") == []


def test_a_dropped_row_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    rows = rows_with_poison(tmp_path / "rows", every=10)
    target = poisoned_target()
    build_cache(target, rows, tmp_path / "cache", SETTINGS)
    reader = CacheReader(tmp_path / "cache")
    kept = [row for index, row in enumerate(rows) if index not in (3, 13)]
    assert len(reader) == len(kept) == 18
    for row, stored in zip(kept, reader, strict=True):
        assert stored.token_ids.tolist() == row.token_ids.tolist()
        with torch.inference_mode():
            taps = target.forward(torch.from_numpy(row.token_ids).long()[None], taps=reader.taps).taps[0]
        np.testing.assert_allclose(stored.taps, taps, rtol=2**-7, atol=1e-3)
    assert build_cache(target, rows, tmp_path / "cache", SETTINGS)["written_shards"] == 0
