"""The tiny run that `make chaos` disturbs: its config, its commands, commands in forked children, and digests of what they leave.

Knows how a command is run and how it ended; knows no fault.
"""

import contextlib
import dataclasses
import faulthandler
import hashlib
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draftsmith.cli import main as draftsmith
from draftsmith.files import digest

PATIENCE = 120  # seconds: a command that needs longer hangs
LAUNCHER = 5  # seconds that the launcher of several ranks gives the others to end when one is dead
COSTS = ("speedup", "draft_cost", "verify_cost", "speedup_predicted")
TIMES = ("tokens_per_second", "memory_gb", "data_wait", *COSTS, "created", "seconds", "version")
WORDS = (
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
)
CONFIG = """
run_root: {root}
data: {{sources: [{{kind: json, path: {rows}}}], max_length: 48, held_out: 0.2}}
target:
  scratch: {{vocabulary: 300, width: 16, blocks: 2, heads: 2, kv_heads: 1, intermediate: 24, context: 96, tokens: 1200,
            batch_tokens: 128, bigram_epochs: 2, log_every: 1}}
cache: {{k: 8, shard_mb: 0.05, state_codec: fp32}}
distill: {{tokens: 1200, batch_tokens: 96, accumulate: 2, validations: 2, held_out_rows: 2, log_every: 1, checkpoint_every: 2,
          bad_rows: 0}}
eagle: {{head: {{rollouts: 2, tokens: 1200, batch_tokens: 96, accumulate: 2, validations: 2, held_out_rows: 2, log_every: 1,
         checkpoint_every: 2, bad_rows: 0}}}}
evaluation: {{drafts: [distilled, head], prompts: 1, prompt_tokens: 12, max_new_tokens: 8, K: 2, timed_prompts: 1}}
tracking: {{trackers: []}}
"""


@dataclasses.dataclass(frozen=True)
class Step:
    """A command of the run. reads, makes: folders below the run's; ranks: several may do it; aside: nothing rests on it."""

    command: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    ranks: bool = False
    trains: bool = False
    aside: bool = False


TARGET = ("target-rows", "target")
ON_POLICY = ("cache.online=true", "distill.on_policy={share: 0.5, every: 3}")
STEPS = {
    "target": Step("target", (), TARGET, trains=True),
    "prepare": Step("prepare", TARGET, ("rows",)),
    "cache": Step("cache", (*TARGET, "rows"), ("cache",), ranks=True),
    "distill on-policy": Step("distill", (*TARGET, "rows"), ("draft",), ON_POLICY, trains=True, aside=True),
    "distill": Step("distill", (*TARGET, "rows", "cache"), ("draft",), ranks=True, trains=True),
    "train-eagle": Step("train-eagle", (*TARGET, "rows", "cache"), ("eagle",), ranks=True, trains=True),
    "eval-acceptance": Step("eval-acceptance", (*TARGET, "rows", "cache", "draft", "eagle"), ("eval",)),
}


@dataclasses.dataclass
class Ended:
    """How a command ended. code: its exit code, negative for a signal, None where it hung and was killed."""

    code: int | None
    text: str
    seconds: float = 0.0

    @property
    def one_line(self) -> str:
        """What it told the user at its end; "" where that is not one line."""
        lines = [line for line in self.text.splitlines() if line.startswith("draftsmith: ")]
        return lines[0] if len(lines) == 1 and "Traceback" not in self.text else ""


class Child:
    """A forked process that does one thing, with its output in a file."""

    def __init__(self, act: Callable[[], Any], log: Path) -> None:
        self.log, self.started = log, time.monotonic()
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            code = 1
            try:
                with log.open("wb") as out:
                    os.dup2(out.fileno(), 1)
                    os.dup2(out.fileno(), 2)
                # Whatever the parent has put in their place (a test's capture) is not the child's.
                sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
                faulthandler.dump_traceback_later(0.9 * PATIENCE)  # where one that hangs stands
                try:
                    act()
                except SystemExit as ended:
                    code = int(ended.code or 0)
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        self.pid = pid

    def alive(self) -> bool:
        """Whether it still runs; one that has ended waits to be collected, so that signals to it reach nobody else."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def kill(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait(self, patience: float = PATIENCE) -> bool:
        """Whether it ends within so many seconds of its start."""
        while time.monotonic() - self.started < patience:
            if not self.alive():
                return True
            time.sleep(0.005)
        return not self.alive()

    def end(self) -> Ended:
        """Its end; of one that hangs, by force."""
        hangs = not self.wait()
        if hangs:
            self.kill(signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        text = self.log.read_text(errors="replace")
        return Ended(None if hangs else code, text, time.monotonic() - self.started)


def code() -> str:
    """Names the code that faults are injected into: a campaign goes on only where that is the same."""
    root = Path(__file__).resolve().parents[1]
    files = [
        path for folder in ("draftsmith", "data", "models", "train", "eval") for path in (root / folder).rglob("*.py")
    ]
    files += (root / "benchmarks").glob("chaos*.py")
    return digest({path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in files})


def command(arguments: Sequence[str]) -> None:
    """One `draftsmith` command; the target, done before its first checkpoint otherwise, writes one every two steps."""
    from draftsmith.train import pretrain

    pretrain.CHECKPOINT_EVERY = 2
    draftsmith(list(arguments))


def rank(index: int, port: int, arguments: Sequence[str]) -> None:
    """A `draftsmith` command as rank `index` of two."""
    os.environ |= {
        "RANK": str(index), "WORLD_SIZE": "2", "LOCAL_RANK": str(index), "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    command(arguments)


def free_port() -> int:
    """A port that nobody has right now."""
    with contextlib.closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def end_ranks(ranks: Sequence[Child]) -> list[Ended]:
    """The ends of all ranks. Like their launcher: when one fails the others are asked to end, then made to."""
    while any(child.alive() for child in ranks) and not any(_failed(child) for child in ranks):
        if time.monotonic() - ranks[0].started > PATIENCE:
            break
        time.sleep(0.005)
    for number, patience in ((signal.SIGTERM, LAUNCHER), (signal.SIGKILL, 0.0)):
        for child in ranks:
            child.kill(number)
        for child in ranks:
            child.wait(time.monotonic() - child.started + patience)
    return [child.end() for child in ranks]


def _failed(child: Child) -> bool:
    found = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return found is not None and (found.si_code != os.CLD_EXITED or found.si_status != 0)


def contents(run: Path, folders: Sequence[str]) -> dict[str, str]:
    """A digest of every file below some folders of a run; times are left out."""
    found = {}
    for folder in folders:
        for path in sorted((run / folder).rglob("*")):
            if path.is_file():
                found[path.relative_to(run).as_posix()] = hashlib.sha256(_comparable(path)).hexdigest()
    return found


def _comparable(path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix not in (".json", ".jsonl"):
        return content
    try:
        parts = [content] if path.suffix == ".json" else content.splitlines()
        return json.dumps([_timeless(json.loads(part)) for part in parts]).encode()
    except ValueError:
        return content  # damaged: it differs from whatever it is held against


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(inner) for key, inner in value.items() if key not in TIMES}
    return [_timeless(inner) for inner in value] if isinstance(value, list) else value


def write_rows(path: Path) -> None:
    """Forty texts of forty words."""
    rng = random.Random(0)
    path.write_text("\n".join(json.dumps({"text": " ".join(rng.choices(WORDS, k=40))}) for _ in range(40)))


def import_all() -> None:
    """Once, and not in every child. Nothing is computed here: a process that has threads is not to be forked."""
    for name in ("accelerate", "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto"):
        importlib.import_module(name)
    stages = ("stages", "data.prepare", "data.tokenizer", "data.cache.build", "data.importers", "train.pretrain")
    for name in (*stages, "train.distill", "train.eagle", "eval.acceptance", "eval.decode", "eval.report"):
        importlib.import_module(f"draftsmith.{name}")
