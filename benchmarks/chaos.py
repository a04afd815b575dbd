"""`make chaos`: faults injected into prepare, cache, distill, train-eagle and eval; survivors are compared with an undisturbed run.

Every fault is one run of a stage in a forked child of this process (whose imports are paid once), from a copy of the reference run
as it was before that stage; then the same command runs again without a fault. Survived: the results are, byte for byte but for
times, those of the reference. Stopped: exit code 2 with one line both times, nothing of the reference lost. Anything else failed.
Finished faults are lines of chaos.jsonl in the work folder and are not repeated.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from draftsmith.cli import main as draftsmith
from draftsmith.environment import describe_environment
from draftsmith.files import publish_json, publish_text
from draftsmith.tracking import Tracking

STAGES = ("prepare", "cache", "distill", "train-eagle", "eval-acceptance")
MADE = {  # what a stage leaves behind
    "prepare": ("rows",), "cache": ("cache",), "distill": ("draft",), "train-eagle": ("eagle",), "eval-acceptance": ("eval",),
}  # fmt: skip
KINDS = ("kill", "terminate", "truncate", "flip", "full disk", "tracker", "dead rank", "slow disk")
TIMES = ("tokens_per_second", "memory_gb", "data_wait", "speedup", "created", "seconds", "version")
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "box",
    "in",
    "fog",
]
PATIENCE = 120  # seconds: a child that needs longer hangs
CONFIG = """
run_root: {root}
data: {{sources: [{{kind: json, path: {root}/rows.jsonl}}], max_length: 48, held_out: 0.2}}
target:
  scratch: {{vocabulary: 300, width: 16, blocks: 2, heads: 2, kv_heads: 1, intermediate: 24, context: 96, tokens: 600,
            batch_tokens: 128, bigram_epochs: 2}}
cache: {{k: 8, shard_mb: 0.05, state_codec: fp32}}
distill: {{tokens: 1200, batch_tokens: 96, accumulate: 2, validations: 2, held_out_rows: 2, log_every: 1, checkpoint_every: 2,
          bad_rows: 0}}
eagle: {{head: {{rollouts: 2, tokens: 1200, batch_tokens: 96, validations: 2, held_out_rows: 2, log_every: 1,
         checkpoint_every: 2, bad_rows: 0}}}}
evaluation: {{drafts: [distilled, head], prompts: 1, prompt_tokens: 12, max_new_tokens: 8, K: 2, timed_prompts: 1}}
tracking: {{trackers: []}}
"""


@dataclasses.dataclass
class Child:
    """How a command ended. code: its exit code, negative for a signal, None where it hung and was killed."""

    code: int | None
    text: str
    seconds: float

    @property
    def clean(self) -> bool:
        """Ended well, or was stopped with one line for the user."""
        if self.code == 0:
            return True
        lines = [line for line in self.text.splitlines() if line.startswith("draftsmith: ")]
        return self.code in (2, 130, 143) and len(lines) == 1 and "Traceback" not in self.text


def in_child(
    act: Callable[[], Any], log: Path, disturb: Callable[[int, float], None] = lambda pid, started: None
) -> Child:
    """`act` in a forked process whose output goes to `log`; `disturb(pid, start)` runs here beside it."""
    started = time.monotonic()
    if (pid := os.fork()) == 0:
        code = 1
        try:
            with log.open("wb") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            try:
                act()
            except SystemExit as ended:
                code = int(ended.code or 0)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
        finally:
            os._exit(code)
    disturb(pid, started)
    while time.monotonic() - started < PATIENCE:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return Child(os.waitstatus_to_exitcode(status), log.read_text(errors="replace"), time.monotonic() - started)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return Child(None, log.read_text(errors="replace"), PATIENCE)


def contents(run: Path, stage: str) -> dict[str, str]:
    """A digest of every result of a stage; times and free-running names are left out."""
    found = {}
    for folder in MADE[stage]:
        for path in sorted((run / folder).rglob("*")):
            if path.is_file():
                content = path.read_bytes()
                if path.suffix in (".json", ".jsonl"):
                    lines = [content] if path.suffix == ".json" else content.splitlines()
                    content = json.dumps([_timeless(json.loads(line)) for line in lines]).encode()
                found[path.relative_to(run).as_posix()] = hashlib.sha256(content).hexdigest()
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(inner) for key, inner in value.items() if key not in TIMES}
    return [_timeless(inner) for inner in value] if isinstance(value, list) else value


class Campaign:
    """The reference run with a copy of its state before every stage, and faults against it."""

    def __init__(self, work: Path, stages: tuple[str, ...] = STAGES) -> None:
        self.work, self.stages = work, stages
        self.run, self.config, self.after = work / "x", work / "x.yaml", work / "after"
        self.before: dict[str, Path] = {}
        self.wanted: dict[str, dict[str, str]] = {}
        self.seconds: dict[str, float] = {}
        self.tmpfs = _can_mount(work)

    def prepare(self) -> None:
        """The undisturbed run, stage by stage."""
        rng = random.Random(0)
        texts = [" ".join(rng.choice(WORDS) for _ in range(40)) for _ in range(40)]
        (self.work / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
        self.config.write_text(CONFIG.format(root=self.work))
        self.command("target")
        for stage in self.stages:
            self.before[stage] = self.work / "before" / stage
            shutil.copytree(self.run, self.before[stage], dirs_exist_ok=True)
            self.seconds[stage] = self.command(stage).seconds
            self.wanted[stage] = contents(self.run, stage)
            assert self.wanted[stage], stage
        shutil.copytree(self.run, self.after)

    def command(self, stage: str, **options: Any) -> Child:
        """One command, which must end well unless it is disturbed."""
        child = in_child(lambda: draftsmith([stage, str(self.config)]), self.work / "log.txt", **options)
        if not options and child.code != 0:
            raise RuntimeError(f"{stage} fails without a fault:\n{child.text}")
        return child

    def fault(self, number: int) -> dict[str, Any]:
        """Inject fault `number`; its kind, stage and moment follow from the number alone."""
        rng = random.Random(number)
        kind = KINDS[number % len(KINDS)]
        trained = kind in ("tracker", "dead rank")
        stage = rng.choice([stage for stage in self.stages if not trained or stage in ("distill", "train-eagle")])
        self._fresh(stage)
        started = time.monotonic()
        try:
            about, first = getattr(self, f"_{kind.replace(' ', '_')}")(stage, rng)
            again = in_child(lambda: draftsmith([stage, str(self.config)]), self.work / "log.txt")
            outcome = self._judge(kind, stage, first, again)
        finally:
            self._clear()
        fault = {"number": number, "kind": kind, "stage": stage, "about": about, "outcome": outcome}
        fault |= {"first": first.code, "again": again.code, "seconds": round(time.monotonic() - started, 2)}
        if outcome == "failed":
            fault["text"] = (first.text + again.text)[-3000:]
        return fault

    def _judge(self, kind: str, stage: str, first: Child, again: Child) -> str:
        killed = first.code == -signal.SIGKILL and kind in ("kill", "dead rank")
        if not (killed or first.clean) or not again.clean:
            return "failed"
        if again.code != 0:
            return "stopped"
        if kind == "dead rank":  # other sums of the same numbers: equal but for rounding
            return "survived" if self._close(stage) else "failed"
        return "survived" if contents(self.run, stage) == self.wanted[stage] else "failed"

    def _close(self, stage: str) -> bool:
        lines = next((self.run / MADE[stage][0]).rglob("training.jsonl")).read_text().splitlines()
        return [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1)) and all(
            abs(json.loads(line)["loss"] - loss) < 1e-3 * loss
            for line, loss in zip(lines, self.losses[stage], strict=True)
        )

    @property
    def losses(self) -> dict[str, list[float]]:
        """Of the undisturbed trainings."""
        found = {}
        for stage in ("distill", "train-eagle"):
            lines = next((self.after / MADE[stage][0]).rglob("training.jsonl")).read_text().splitlines()
            found[stage] = [json.loads(line)["loss"] for line in lines]
        return found

    def _fresh(self, stage: str) -> None:
        self._clear()
        shutil.copytree(self.before[stage], self.run)

    def _clear(self) -> None:
        if os.path.ismount(self.run):
            subprocess.run(["umount", str(self.run)], check=True)
        shutil.rmtree(self.run, ignore_errors=True)

    # The faults: each returns what it did, and how the disturbed command ended.

    def _kill(self, stage: str, rng: random.Random, number: int = signal.SIGKILL) -> tuple[str, Child]:
        moment = rng.uniform(0.0, 1.1 * self.seconds[stage])

        def disturb(pid: int, started: float) -> None:
            while time.monotonic() - started < moment:
                time.sleep(0.002)
            os.kill(pid, number)  # a child that has ended waits to be collected: the signal does nothing

        return f"after {moment:.2f} s", self.command(stage, disturb=disturb)

    def _terminate(self, stage: str, rng: random.Random) -> tuple[str, Child]:
        return self._kill(stage, rng, signal.SIGTERM)

    def _truncate(self, stage: str, rng: random.Random) -> tuple[str, Child]:
        path, content = self._victim(stage, rng)
        length = rng.randrange(len(content))
        path.write_bytes(content[:length])
        return f"{path.relative_to(self.run)} to {length} of {len(content)} bytes", self._disturbed(stage)

    def _flip(self, stage: str, rng: random.Random) -> tuple[str, Child]:
        path, content = self._victim(stage, rng)
        place, bit = rng.randrange(len(content)), rng.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        return f"bit {bit} of byte {place} of {path.relative_to(self.run)}", self._disturbed(stage)

    def _victim(self, stage: str, rng: random.Random) -> tuple[Path, bytes]:
        """A file that the stage reads: of the stages before it, or of its own part that was killed half-way."""
        if rng.random() < 0.5:
            self._kill(stage, rng)
        files = [
            path
            for folder in ("rows", "cache", "draft", "eagle", "eval", "stages")
            for path in sorted((self.run / folder).rglob("*"))
            if path.is_file() and path.stat().st_size
        ] or sorted(path for path in (self.run / "target").rglob("*") if path.is_file())
        victim = rng.choice(files)
        return victim, victim.read_bytes()

    def _full_disk(self, stage: str, rng: random.Random) -> tuple[str, Child]:
        written = sum(path.stat().st_size for name in MADE[stage] for path in (self.after / name).rglob("*"))
        room = int(rng.uniform(0.0, 1.0) * written)
        if not self.tmpfs:
            limit = max(4096, room // 2)

            def act() -> None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                draftsmith([stage, str(self.config)])

            return f"no file over {limit} bytes", in_child(act, self.work / "log.txt")
        used = sum(-(-path.stat().st_size // 4096) * 4096 + 4096 for path in self.run.rglob("*"))
        shutil.rmtree(self.run)
        self.run.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={used + room + 65536}", "tmpfs", str(self.run)], check=True
        )
        shutil.copytree(self.before[stage], self.run, dirs_exist_ok=True)
        first = self._disturbed(stage)
        subprocess.run(["mount", "-o", "remount,size=256m", str(self.run)], check=True)
        return f"tmpfs with {room + 65536} bytes free", first

    def _tracker(self, stage: str, rng: random.Random) -> tuple[str, Child]:
        last = rng.randrange(8)

        class Failing:
            def __init__(self) -> None:
                self.seen = 0

            def store_init_configuration(self, values: dict[str, Any]) -> None: ...

            def log(self, values: dict[str, float], step: int) -> None:
                self.seen += 1
                if self.seen > last:
                    raise ConnectionError("the tracker is gone")

            def finish(self) -> None:
                raise TimeoutError("the tracker is gone")

        def act() -> None:
            Tracking._create = lambda self, name: Failing()  # type: ignore[method-assign]
            draftsmith([stage, str(self.config), "tracking.trackers=[wandb]"])

        first = in_child(act, self.work / "log.txt")
        if first.code != 0:
            first.text += "Traceback: a tracker stopped the training"
        return f"raises after {last} values", first

    def _dead_rank(self, stage: str, rng: random.Random) -> tuple[str, Child]:
        """Two ranks, the second killed; like its launcher, this process then ends the first."""
        port, moment = 20000 + rng.randrange(20000), rng.uniform(0.1, 1.5) * self.seconds[stage]

        def rank(index: int) -> Callable[[], None]:
            def act() -> None:
                os.environ |= {
                    "RANK": str(index), "WORLD_SIZE": "2", "LOCAL_RANK": str(index), "LOCAL_WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                }  # fmt: skip
                draftsmith([stage, str(self.config)])

            return act

        def kill_both(pid: int, started: float) -> None:
            def after(second: int, began: float) -> None:
                time.sleep(moment)
                os.kill(second, signal.SIGKILL)

            in_child(rank(1), self.work / "log-1.txt", after)
            os.kill(pid, signal.SIGKILL)

        return f"after {moment:.2f} s", in_child(rank(0), self.work / "log.txt", kill_both)

    def _slow_disk(self, stage: str, rng: random.Random) -> tuple[str, Child]:
        delay, flush = rng.uniform(0.005, 0.05), os.fsync

        def act() -> None:
            os.fsync = lambda handle: (time.sleep(delay), flush(handle))[1]  # type: ignore[assignment, func-returns-value]
            draftsmith([stage, str(self.config)])

        return f"{1000 * delay:.0f} ms a flush", in_child(act, self.work / "log.txt")

    def _disturbed(self, stage: str) -> Child:
        return in_child(lambda: draftsmith([stage, str(self.config)]), self.work / "log.txt")


def _can_mount(work: Path) -> bool:
    place = work / "tmpfs"
    place.mkdir(exist_ok=True)
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, check=False
    ).returncode:
        return False
    subprocess.run(["umount", str(place)], check=True)
    return True


def table(faults: list[dict[str, Any]]) -> str:
    """Outcomes counted by kind, as Markdown."""
    counts = Counter((fault["kind"], fault["outcome"]) for fault in faults)
    lines = ["| fault | injected | survived | stopped cleanly | failed |", "|---|---|---|---|---|"]
    for kind in (*KINDS, "all"):
        of = [counts[kind, outcome] for outcome in ("survived", "stopped", "failed")]
        if kind == "all":
            of = [sum(fault["outcome"] == outcome for fault in faults) for outcome in ("survived", "stopped", "failed")]
        lines.append(f"| {kind} | {sum(of)} | {of[0]} | {of[1]} | {of[2]} |")
    return "\n".join(lines)


def write_study(faults: list[dict[str, Any]], tmpfs: bool) -> None:
    """docs/studies/chaos.json, and the table between the marks of docs/reliability.md."""
    disk = "a tmpfs that runs full" if tmpfs else "RLIMIT_FSIZE"
    study = {"environment": describe_environment(), "command": "make chaos", "full disk": disk, "faults": faults}
    publish_json(Path("docs/studies/chaos.json"), study)
    page = Path("docs/reliability.md")
    start, end = "<!-- chaos -->\n", "<!-- end of chaos -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(start)
    publish_text(page, f"{before}{start}\nFull disk: {disk}.\n\n{table(faults)}\n\n{end}{rest.partition(end)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument(
        "--minutes", type=float, default=18.0, help="begin no fault after this long; another call goes on"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/chaos"), help="keeps chaos.jsonl between calls")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a forked child has no threads but its own
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    arguments.work.mkdir(parents=True, exist_ok=True)
    journal, started = arguments.work / "chaos.jsonl", time.monotonic()
    faults = [json.loads(line) for line in journal.read_text().splitlines()] if journal.is_file() else []
    done = {fault["number"] for fault in faults}
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder))
        campaign.prepare()
        print(
            "reference:",
            ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in campaign.seconds.items()),
            flush=True,
        )
        for number in range(arguments.faults):
            if number in done or time.monotonic() - started > 60 * arguments.minutes:
                continue
            fault = campaign.fault(number)
            faults.append(fault)
            with journal.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(fault) + "\n")
            print(
                *(fault[key] for key in ("number", "kind", "stage", "about", "outcome", "seconds")),
                sep="  ",
                flush=True,
            )
    if len(faults) >= arguments.faults:
        write_study(faults, campaign.tmpfs)
    else:
        print(f"{len(faults)} of {arguments.faults} faults so far: the same command goes on")
    print(table(faults))
    sys.exit(any(fault["outcome"] == "failed" for fault in faults))


if __name__ == "__main__":
    main()
