"""Memory that training really takes against what `plan` says: the table of docs/scaling.md, from a finished demo.

    python benchmarks/memory.py runs/demo-tiny runs/demo

Each row trains one draft for a few steps in a process of its own, with links to the demo's target, rows and cache, and reads
/proc/PID/smaps (Linux) until it ends. Shards of the cache that the process has mapped are not counted, as `plan` says.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from draftsmith.environment import describe_environment
from draftsmith.errors import UserError

sys.path.insert(0, str(Path(__file__).parent))
from markdown import fill, table

# Of a draft: its name, and settings beside those of the demo's config.
CASES: tuple[tuple[str, dict[str, int]], ...] = (
    ("distilled", {}),
    ("eagle3", {}),
    ("distilled", {"batch_tokens": 4096}),
    ("eagle3", {"batch_tokens": 4096}),
)
STEPS, EVERY = 2, 0.05  # seconds between two looks
# glibc keeps what is freed below a size that it raises itself, up to 32 MB; with a size of ours it gives back all from there on.
RETURNING = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}


def row(run: Path, draft: str, changes: dict[str, int]) -> list[str]:
    """The cells of one line: what `plan` says, and the largest resident set of the process that trains."""
    about = yaml.safe_load((run / "resolved.yaml").read_text(encoding="utf-8"))
    section = about["distill"] if draft == "distilled" else about["eagle"][draft]
    section |= changes
    section["tokens"] = STEPS * section["batch_tokens"]
    about |= {"eagle": {} if draft == "distilled" else {draft: section}, "tracking": {"trackers": []}}
    about["evaluation"]["drafts"] = ["prompt-lookup"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / run.name
        folder.mkdir()
        shutil.copytree(run / "stages", folder / "stages")
        for name in ("target", "target-rows", "rows", "cache"):
            (folder / name).symlink_to((run / name).resolve())
        config = Path(place) / f"{run.name}.yaml"
        config.write_text(yaml.safe_dump(about | {"name": run.name, "run_root": place}), encoding="utf-8")
        said = _planned(config, draft)
        stage = "distill" if draft == "distilled" else "train-eagle"
        peaks = [_peak(stage, config, environment) for environment in (RETURNING, {})]
    cells = [run.name, draft, f"{section['batch_tokens']:,}", f"{said / 1e6:,.0f}"]
    return cells + [cell for peak in peaks for cell in (f"{peak / 1e6:,.0f}", f"{said / peak - 1:+.0%}")]


def _planned(config: Path, draft: str) -> float:
    """Bytes that `plan` says. Raises UserError where it would make target, rows or cache again: they are another run's."""
    command = [sys.executable, "-m", "draftsmith", "plan", str(config)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for stage in ("target", "prepare", "cache"):
        if not re.search(rf"{stage} .*be skipped", text):
            raise UserError(f"{config}: {stage} is not up to date; finish the demo first")
    found = re.search(rf"memory to train {draft} on one rank:\s+([\d,.]+) (MB|GB)", text)
    assert found is not None, text
    return float(found[1].replace(",", "")) * (1e6 if found[2] == "MB" else 1e9)


def _peak(stage: str, config: Path, environment: dict[str, str]) -> int:
    """The most bytes that a stage's process has in memory, mapped shards of the cache aside."""
    command, most = [sys.executable, "-m", "draftsmith", stage, str(config)], 0
    shutil.rmtree(config.parent / config.stem / ("draft" if stage == "distill" else "eagle"), ignore_errors=True)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": os.environ | environment}
    with subprocess.Popen(command, **quiet) as process:
        while process.poll() is None:
            most = max(most, _resident(process.pid))
            time.sleep(EVERY)
    if process.returncode:
        raise UserError(f"`draftsmith {stage}` ended with {process.returncode}; run it alone to see why")
    return most


def _resident(pid: int) -> int:
    """Resident bytes of a process without its mapped shards; 0 when it has gone."""
    total = 0
    try:
        text = Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8")
    except OSError:
        return 0
    counted = True
    for line in text.splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counted = "/shard-" not in line
        elif line.startswith("Rss:") and counted:
            total += int(line.split()[1]) * 1024
    return total


def measured(runs: list[Path]) -> str:
    """What stands between the marks of the page."""
    about = describe_environment()
    machine = f"{about['processor']}, {about['cores']} cores, {about['threads']} thread, torch {about['packages']['torch']}, fp32"
    heads = ("run", "draft", "`batch_tokens`", "planned, MB")
    heads += (
        "measured, freed memory returned, MB",
        "planned against it",
        "measured as it is, MB",
        "planned against it",
    )
    lines = [row(run, draft, changes) for run in runs for draft, changes in CASES]
    return f"{machine}; {STEPS} steps each.\n\n{table(heads, lines)}"


if __name__ == "__main__":
    fill(Path("docs/scaling.md"), "memory", measured([Path(place) for place in sys.argv[1:]]))
