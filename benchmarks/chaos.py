"""`make chaos`: faults injected into every stage from target to eval-acceptance, each held against an undisturbed run.

Every fault is one command in a forked child of a process whose imports are paid once, from a copy of the reference run as it was
before that command. A killed one runs again. Survived: all results are then those of the reference, byte for byte but for times.
Stopped: exit code 2 and one line, the earlier stages' results as they were, and what the line names leads to the reference; it is
enough for damaged files, a full disk and a dead rank alone. Anything else failed. Two ranks are held against an undisturbed run of
two. Finished faults are lines of chaos.jsonl in the work folder and are not repeated while the code is the same.
"""

import argparse
import functools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from chaos_page import KINDS, MAY_STOP, study_rows, table, write_study
from chaos_run import (
    CONFIG,
    STEPS,
    Child,
    Ended,
    code,
    command,
    contents,
    end_ranks,
    free_port,
    import_all,
    rank,
    write_rows,
)

from draftsmith.environment import describe_environment
from draftsmith.tracking import Tracking

SOONER = (1.0, 0.6, 0.3, 0.1, 0.0)  # what came too late, or left room enough, was no fault: so much of it is tried next
BLOCK = 4096
CUT = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM)  # ends of a command that was told to end


class Campaign:
    """The reference run with a copy of its state before every step, and faults against it."""

    def __init__(self, work: Path, steps: tuple[str, ...] = tuple(STEPS), ranks: bool = True) -> None:
        """ranks: whether faults of several ranks are to be held against a reference of their own."""
        self.ranks = ranks
        self.reference, self.steps = work, {name: STEPS[name] for name in steps}
        self.before: dict[str, Path] = {}
        self.wanted: dict[tuple[str, bool], dict[str, str]] = {}  # results by (step, whether of two ranks)
        self.seconds: dict[tuple[str, bool], float] = {}
        self.made: dict[str, int] = {}  # bytes by step
        write_rows(work / "rows.jsonl")
        self.tmpfs = _can_mount(work)
        self.settle(work / "reference")

    def settle(self, place: Path) -> None:
        """Work in this folder from now on."""
        place.mkdir()
        self.place, self.run, self.config = place, place / "x", place / "x.yaml"
        self.config.write_text(CONFIG.format(root=place, rows=self.reference / "rows.jsonl"))

    def prepare(self) -> None:
        """The undisturbed run, step by step."""
        for name, step in self.steps.items():
            self.before[name] = self.reference / "before" / name.replace(" ", "-")
            self.run.mkdir(exist_ok=True)
            shutil.copytree(self.run, self.before[name])
            for ranks in (True, False) if step.ranks and self.ranks else (False,):
                self.fresh(name)
                ended = end_ranks(self._ranks(name)) if ranks else [self.command(name)]
                if any(child.code for child in ended):
                    raise RuntimeError(f"{name} fails without a fault:\n{''.join(child.text for child in ended)}")
                self.wanted[name, ranks] = self.results(name)
                self.seconds[name, ranks] = ended[0].seconds
            self.made[name] = sum(_blocks(self.run / folder) for folder in step.makes)
            if step.aside:
                self.fresh(name)

    def results(self, name: str) -> dict[str, str]:
        """Digests of all that a step reads and makes."""
        return contents(self.run, (*self.steps[name].reads, *self.steps[name].makes))

    def start(self, name: str, first: str | None = None) -> Child:
        """The command of a step, or with `first` that command in its place."""
        step = self.steps[name]
        arguments = [first or step.command, str(self.config), *step.overrides]
        return Child(functools.partial(command, arguments), self.place / "log.txt")

    def command(self, name: str, first: str | None = None) -> Ended:
        """The same, to its end."""
        return self.start(name, first).end()

    def _ranks(self, name: str) -> list[Child]:
        port, arguments = free_port(), [self.steps[name].command, str(self.config)]
        return [
            Child(functools.partial(rank, index, port, arguments), self.place / f"log-{index}.txt") for index in (0, 1)
        ]

    def fresh(self, name: str) -> None:
        """The run as it was before a step."""
        self.clear()
        shutil.copytree(self.before[name], self.run)

    def clear(self) -> None:
        """No run at all."""
        if os.path.ismount(self.run):
            subprocess.run(["umount", str(self.run)], check=True)
        shutil.rmtree(self.run, ignore_errors=True)

    def fault(self, number: int) -> dict[str, Any]:
        """Fault `number`: its kind, step and moment follow from the number alone."""
        kind = KINDS[number % len(KINDS)]
        able = [
            name
            for name, step in self.steps.items()
            if (step.trains or kind != "tracker") and (step.ranks or kind != "dead rank")
        ]
        return {"number": number} | self.inject(kind, able[number // len(KINDS) % len(able)], random.Random(number))

    def inject(self, kind: str, name: str, rng: random.Random) -> dict[str, Any]:
        """One fault and what became of it."""
        started, act = time.monotonic(), getattr(self, f"_{kind.replace(' ', '_')}")
        try:
            for sooner in SOONER:
                self.fresh(name)
                state = rng.getstate()
                about, first, hit, victim = act(name, rng, sooner)
                if hit:
                    break
                rng.setstate(state)
            outcome, ends, lost = self._judge(kind, name, first, victim)
        finally:
            self.clear()
        fault = {"kind": kind, "stage": name, "about": about, "outcome": outcome, "codes": [end.code for end in ends]}
        fault |= {"lost": lost, "seconds": round(time.monotonic() - started, 2)}
        lines = [end.one_line for end in ends if end.one_line]
        return fault | ({"text": "".join(end.text for end in ends)[-6000:]} if outcome == "failed" else {"said": lines})

    def _judge(self, kind: str, name: str, first: Ended, victim: str | None) -> tuple[str, list[Ended], list[str]]:
        """The outcome, the ends of all commands, and what of the reference is lost in the end."""
        ends, ranks, stopped = [first], kind == "dead rank", False
        if first.code in CUT and kind in ("kill", "terminate", "dead rank"):
            ends.append(self._again(name, ranks))
        lost: list[str] = []
        if ends[-1].code == 2 and ends[-1].one_line:
            stopped = True
            earlier = contents(self.before[name], self.steps[name].reads)
            left = {path: mark for path, mark in self.results(name).items() if path in earlier}
            lost = [path for path in _differ(earlier, left) if path != victim]
            if (remedy := re.search(r"run `draftsmith ([a-z-]+)", ends[-1].one_line)) is not None:
                ends.append(self.command(name, remedy[1]))
            ends.append(self._again(name, ranks))
        lost += _differ(self.wanted[name, ranks], self.results(name))
        return outcome(kind, ends, stopped, bool(lost)), ends, lost

    def _again(self, name: str, ranks: bool) -> Ended:
        """The same command once more. Of several ranks the end that tells most: the one that says why, or the worst."""
        if not ranks:
            return self.command(name)
        ends = end_ranks(self._ranks(name))
        return next(
            (end for end in ends if end.code == 2), max(ends, key=lambda end: (end.code is None, end.code != 0))
        )

    # The faults: each returns what it did, how the command ended, whether the fault came to pass, and the file it damaged.

    def _kill(
        self, name: str, rng: random.Random, sooner: float, number: int = signal.SIGKILL
    ) -> tuple[str, Ended, bool, str | None]:
        moment = sooner * rng.random() * self.seconds[name, False]
        child = self.start(name)
        child.wait(moment)
        child.kill(number)
        ended = child.end()
        return f"after {moment:.2f} s", ended, ended.code != 0, None

    def _terminate(self, name: str, rng: random.Random, sooner: float) -> tuple[str, Ended, bool, str | None]:
        return self._kill(name, rng, sooner, signal.SIGTERM)

    def _truncate(self, name: str, rng: random.Random, sooner: float) -> tuple[str, Ended, bool, str | None]:
        path, content = self._victim(name, rng)
        length = rng.randrange(len(content))
        path.write_bytes(content[:length])
        victim = path.relative_to(self.run).as_posix()
        return f"{victim} to {length} of {len(content)} bytes", self.command(name), True, victim

    def _flip(self, name: str, rng: random.Random, sooner: float) -> tuple[str, Ended, bool, str | None]:
        path, content = self._victim(name, rng)
        place, bit = rng.randrange(len(content)), rng.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        victim = path.relative_to(self.run).as_posix()
        return f"bit {bit} of byte {place} of {victim}", self.command(name), True, victim

    def _victim(self, name: str, rng: random.Random) -> tuple[Path, bytes]:
        """A file that the step reads: of the steps before it, or every other time of what it had made when it was killed."""
        step = self.steps[name]
        made = (*step.makes, *(f".{folder}.partial" for folder in step.makes))
        files: list[Path] = []
        if rng.random() < 0.5 or not step.reads:
            child = self.start(name)
            while child.alive() and not any(found for folder in made for *_, found in os.walk(self.run / folder)):
                time.sleep(0.005)
            child.wait(time.monotonic() - child.started + 0.7 * rng.random() * self.seconds[name, False])
            child.kill(signal.SIGKILL)
            child.end()
            files = list(self._files(made))
        victim = rng.choice(files or list(self._files((*step.reads, "stages"))))  # what it had made may be empty still
        return victim, victim.read_bytes()

    def _files(self, folders: tuple[str, ...]) -> Iterator[Path]:
        for folder in folders:
            yield from (p for p in sorted((self.run / folder).rglob("*")) if p.is_file() and p.stat().st_size)

    def _full_disk(self, name: str, rng: random.Random, sooner: float) -> tuple[str, Ended, bool, str | None]:
        room = int(sooner * rng.random() * self.made[name])
        if not self.tmpfs:
            limit = max(BLOCK, room // 2)

            def act() -> None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                command([self.steps[name].command, str(self.config), *self.steps[name].overrides])

            ended = Child(act, self.place / "log.txt").end()
            return f"no file over {limit} bytes", ended, ended.code != 0 or sooner == 0, None
        size = max(BLOCK, _blocks(self.run) + room // BLOCK * BLOCK)
        self.clear()
        self.run.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(self.run)], check=True)
        shutil.copytree(self.before[name], self.run, dirs_exist_ok=True)
        ended = self.command(name)
        subprocess.run(["mount", "-o", "remount,size=256m", str(self.run)], check=True)
        return f"tmpfs with {room // BLOCK * BLOCK} bytes free", ended, ended.code != 0, None

    def _tracker(self, name: str, rng: random.Random, sooner: float) -> tuple[str, Ended, bool, str | None]:
        last = rng.randrange(6)

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
            step = self.steps[name]
            command([step.command, str(self.config), *step.overrides, "tracking.trackers=[wandb]"])

        ended = Child(act, self.place / "log.txt").end()
        return f"raises after {last} values", ended, "the tracker is gone" in ended.text or sooner == 0, None

    def _dead_rank(self, name: str, rng: random.Random, sooner: float) -> tuple[str, Ended, bool, str | None]:
        """Two ranks, one of them killed; the launcher ends the other."""
        dead, moment = rng.randrange(2), sooner * rng.random() * self.seconds[name, True]
        ranks = self._ranks(name)
        ranks[dead].wait(moment)
        ranks[dead].kill(signal.SIGKILL)
        ended = end_ranks(ranks)[dead]
        return f"rank {dead} after {moment:.2f} s", ended, ended.code != 0, None

    def _slow_disk(self, name: str, rng: random.Random, sooner: float) -> tuple[str, Ended, bool, str | None]:
        delay, flush = rng.uniform(0.005, 0.05), os.fsync

        def act() -> None:
            os.fsync = lambda handle: (time.sleep(delay), flush(handle))[1]  # type: ignore[assignment, func-returns-value]
            command([self.steps[name].command, str(self.config), *self.steps[name].overrides])

        return f"{1000 * delay:.0f} ms a flush", Child(act, self.place / "log.txt").end(), True, None


def outcome(kind: str, ends: list[Ended], stopped: bool, lost: bool) -> str:
    """survived, stopped or failed. ends: of the disturbed command and those after it; stopped: one of them with code 2 and one line
    before what it named was done; lost: a result differs from the reference. A signal that asks must be answered in one line."""
    told = ends[0].code != 128 + signal.SIGTERM or ends[0].one_line
    if lost or ends[-1].code != 0 or not told:
        return "failed"
    if stopped:
        return "stopped" if kind in MAY_STOP else "failed"
    return "survived"


def _differ(wanted: dict[str, str], found: dict[str, str]) -> list[str]:
    """Paths that are missing, new or other."""
    return sorted(path for path in wanted.keys() | found.keys() if wanted.get(path) != found.get(path))


def _blocks(folder: Path) -> int:
    """Bytes that a folder takes on a tmpfs."""
    return sum(-(-path.stat().st_size // BLOCK) * BLOCK for path in folder.rglob("*") if path.is_file())


def _can_mount(work: Path) -> bool:
    (place := work / "tmpfs").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        return False
    subprocess.run(["umount", str(place)], check=True)
    return True


def worker(campaign: Campaign, numbers: int, journal: Path, until: float, of: str) -> None:
    """Faults whose numbers (four bytes each) come from a file, until it ends or the time is over. of: the code."""
    while time.monotonic() < until and (found := os.read(numbers, 4)):
        fault = campaign.fault(int.from_bytes(found)) | {"code": of}
        with journal.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(fault) + "\n")
        print(*(fault[key] for key in ("number", "kind", "stage", "about", "outcome", "seconds")), sep="  ", flush=True)


def side_by_side(campaign: Campaign, numbers: list[int], journal: Path, until: float, workers: int, of: str) -> None:
    """The faults of these numbers, by processes with a folder each."""
    (queue := campaign.reference / "numbers").write_bytes(b"".join(number.to_bytes(4) for number in numbers))
    shared = os.open(queue, os.O_RDONLY)  # one place in the file for all of them
    children = []
    for index in range(workers):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                campaign.settle(campaign.reference / f"worker-{index}")
                worker(campaign, shared, journal, until, of)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        children.append(pid)
    ends = [os.waitpid(pid, 0)[1] for pid in children]
    if any(ends):
        raise RuntimeError("a worker of the campaign failed; its traceback stands above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=18.0, help="begin none after this; another call goes on")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("runs/chaos"), help="keeps chaos.jsonl between calls")
    arguments = parser.parse_args()
    started, of = time.monotonic(), code()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    torch.set_num_threads(1)  # a forked child has no threads but its own
    import_all()
    arguments.work.mkdir(parents=True, exist_ok=True)
    journal = arguments.work / "chaos.jsonl"
    journal.touch()
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder))
        campaign.prepare()
        times = [
            f"{name}{' on two ranks' * ranks} {seconds:.1f} s" for (name, ranks), seconds in campaign.seconds.items()
        ]
        print("reference:", ", ".join(times), flush=True)
        done = {fault["number"] for fault in finished(journal, of)}
        numbers = [number for number in range(arguments.faults) if number not in done]
        side_by_side(campaign, numbers, journal, started + 60 * arguments.minutes, arguments.workers, of)
    faults = [fault for fault in finished(journal, of) if fault["number"] < arguments.faults]
    disk = "a tmpfs that runs full" if campaign.tmpfs else "RLIMIT_FSIZE"
    docs = Path(__file__).resolve().parents[1] / "docs"
    write_study(faults, arguments.faults, disk, describe_environment(), docs)
    print(table(faults))
    if len(faults) < arguments.faults:
        print(f"{len(faults)} of {arguments.faults} faults so far: the same command goes on")
    sys.exit(not all(row["met"] for row in study_rows(faults, len(faults))))


def finished(journal: Path, of: str) -> list[dict[str, Any]]:
    """The faults that this code has been held against: those of other code say nothing of it."""
    faults = map(json.loads, journal.read_text().splitlines())
    return sorted((fault for fault in faults if fault.get("code") == of), key=lambda fault: fault["number"])


if __name__ == "__main__":
    main()
