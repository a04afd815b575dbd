"""Neither caching nor reading needs more memory for more rows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import re, sys
from pathlib import Path
sys.path[:0] = {path!r}
import torch
from draftsmith.data.cache import reader
from kit import tiny_rows, tiny_target
from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.data.cache.reader import CacheReader
torch.set_num_threads(1)
reader.OPEN_SHARDS = 4
folder, count = Path(sys.argv[1]), int(sys.argv[2])
rows, target = tiny_rows(folder, [250] * count), tiny_target(hidden_size=256)
settings = CacheSettings(distribution="topk", taps=(0, 1, 2, 3), state_codec="fp32", last=True, k=8, shard_mb=2, batch_tokens=1000)
build_cache(target, rows, folder / "cache", settings)
def peak():  # of this process; ru_maxrss would count that of the process which started it
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
peaks = [peak()]
for row in CacheReader(folder / "cache"):
    assert row.taps.sum() != 0
print(*peaks, peak())
"""


def peaks(folder: Path, rows: int) -> list[int]:
    """Peak memory in kB of a process after it has cached `rows` rows, and after it has read them all."""
    command = [sys.executable, "-c", CODE.format(path=sys.path), str(folder), str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    return list(map(int, done.stdout.split()[-2:]))


@pytest.mark.parametrize("rows", [8, pytest.param(80, marks=pytest.mark.long)])
def test_ten_times_the_rows_take_no_more_memory(tmp_path: Path, rows: int) -> None:
    """80 rows are 100 MB of shards, a quarter of what a process with torch has; 800 are a gigabyte."""
    few, many = peaks(tmp_path / "few", rows), peaks(tmp_path / "many", 10 * rows)
    stored = sum(path.stat().st_size for path in (tmp_path / "many" / "cache").iterdir()) / 1024
    assert stored > 0.2 * few[0]  # else a process that keeps everything would pass
    for less, more in zip(few, many, strict=True):
        assert more <= 1.1 * less
