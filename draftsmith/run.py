"""The run folder and its memory: which unit of work is still good, which must run, and why.

Knows units as named work with settings, inputs and outputs; knows nothing of what they do. A unit is skipped when its
settings, the runs of its inputs and its outputs are what its record says. A unit that ran again makes all that was
built on it stale even with equal settings: training need not repeat bit for bit.
"""

import errno
import fcntl
import hashlib
import json
import os
import platform
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import xxhash
import yaml

from draftsmith import __version__
from draftsmith.config import Loaded
from draftsmith.errors import UserError, first_line
from draftsmith.files import digest, is_main, publish_json, publish_text, several_ranks
from draftsmith.settings import without_secrets

RECORDS, LOCK = "stages", ".lock"
NOT_OURS = {errno.EACCES, errno.EPERM, errno.EROFS}  # a folder that cannot be written
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FULL_TEXTS = (
    "No space left",
    "File too large",
    "quota exceeded",
    " requested and ",
)  # as libraries that hide the number write it
DIGESTED_BYTES = 64 << 20


@dataclass(frozen=True)
class Unit:
    """One piece of a stage that is skipped or runs as a whole.

    `settings`: JSON, all that its result depends on beside its inputs. `inputs`: keys of earlier units. `outputs`:
    files and folders below the run folder that `work` makes; what lies there from other settings is removed before
    it runs, except where the unit `resumes` and judges that itself. `ranks`: several ranks may do it together. `saved`: folder
    below the run folder in which an interrupted one has its work, as step-N, which no changed setting may throw away unasked.
    """

    stage: str
    name: str
    settings: dict[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    work: Callable[[], None] = field(compare=False)
    resumes: bool = False
    ranks: bool = False
    saved: str = ""

    @property
    def key(self) -> str:
        return f"{self.stage} {self.name}".strip()


class RunFolder:
    """`<run_root>/<name>/`: what the user set, what followed from it, and one record per unit that has run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """The folder itself. Raises UserError where that is impossible."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"run_root: {self.path} cannot be made ({error.strerror}); give another run_root"
            ) from error

    def describe(self, loaded: Loaded) -> None:
        """Write run.yaml (only what the user set) and resolved.yaml."""
        publish_text(self.path / "run.yaml", _yaml(without_secrets(loaded.given)))
        publish_text(self.path / "resolved.yaml", _yaml(without_secrets(loaded.config.model_dump(mode="json"))))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """The folder is this process's alone inside the block. Raises UserError while another one that lives has it.

        The system frees the lock when its owner ends, however that happens: there are no stale ones.
        """
        if not self.path.is_dir():
            raise UserError(f"{self.path}: no such run folder; give a run's folder, such as runs/demo")
        with (self.path / LOCK).open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise UserError(
                    f"{self.path}: in use by {file.read().strip() or 'another process'}; "
                    "wait for its end, or give this run another name"
                ) from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
            yield

    def record(self, key: str) -> dict[str, Any] | None:
        """What is known of the last run of a unit. A damaged record counts as none: the unit runs again."""
        try:
            record = json.loads(self._place(key).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError, RecursionError):
            return None
        return record if _sound(record) else None

    def reason(self, unit: Unit, running: Sequence[str] = ()) -> str:
        """Why `unit` must run, "" when it need not. `running`: keys of units that run before it in the same call."""
        record = self.record(unit.key)
        if record is None:
            return "not done yet"
        if "id" not in record:
            changed = self._differs(unit, record)
            if text := self._refused(unit):
                return f"refused: {text}"
            return (
                f"interrupted last time, then changed: {', '.join(changed)}; begins anew"
                if changed
                else "interrupted last time"
            )
        if record.get("version") != __version__:
            return f"made by version {record.get('version')}"
        if changed := _differences(record.get("settings"), without_secrets(unit.settings)):
            return "changed: " + ", ".join(changed[:4]) + (", …" if len(changed) > 4 else "")
        for key in unit.inputs:
            if key in running or self._id(key) != record.get("inputs", {}).get(key):
                return f"{key} is new"
        for name, mark in record["outputs"].items():
            if _mark(self.path / name) != mark:
                return f"{name} is missing or changed"
        return ""

    def run(self, unit: Unit) -> float:
        """Run `unit` and record it; returns the seconds it took. A failure leaves a record that says "started".

        A unit that resumes may refuse the change and leave its outputs alone: its last record then stays true.
        """
        inputs = {key: self._id(key) for key in unit.inputs}
        state = {"unit": unit.key, "version": __version__, "settings": without_secrets(unit.settings), "inputs": inputs}
        if not unit.resumes and is_main():
            self._clear(unit)
            publish_json(self._place(unit.key), state | {"state": "started"})
        started = time.monotonic()
        try:
            unit.work()
        except Exception as error:
            if disk_is_full(error):
                reason = first_line(error)
                raise UserError(
                    f"{unit.key}: the disk is full ({reason}); free some space and run the same command again"
                ) from error
            raise
        seconds = time.monotonic() - started
        if not is_main():
            return seconds
        finished = {
            "id": uuid.uuid4().hex,
            "outputs": self._marks(unit),
            "seconds": round(seconds, 1),
        }
        publish_json(self._place(unit.key), state | finished)
        return seconds

    def refuse(self, unit: Unit) -> None:
        """Raise UserError where to run `unit` would throw away the saved work of an interrupted run with other settings."""
        if text := self._refused(unit):
            raise UserError(f"{unit.key}: {text}")

    def _refused(self, unit: Unit) -> str:
        """Which settings an interrupted unit with saved work no longer has, and what to do; "" where nothing is at stake."""
        record = self.record(unit.key) if unit.saved else None
        if record is None or "id" in record:
            return ""
        changed = _differences(record.get("settings"), without_secrets(unit.settings))[:4]
        steps = [int(place.name[5:]) for place in (self.path / unit.saved).glob("step-*") if place.name[5:].isdigit()]
        if not changed or not max(steps, default=0):
            return ""
        return (
            f"interrupted at step {max(steps)} with another {', '.join(changed)}; restore the setting to continue it, "
            f"or delete {self.path / unit.saved} to begin anew"
        )

    def _clear(self, unit: Unit) -> None:
        record = self.record(unit.key)
        if record is not None and "id" not in record and not self._differs(unit, record):
            for place in (self.path / name for name in unit.outputs):
                for leftover in (*place.rglob(".*.tmp"), *place.parent.glob(f".{place.name}.*.tmp")):
                    leftover.unlink()  # half a file (`draftsmith.files.publish`)
            return  # interrupted with the same settings: what is there may be of use
        for name in unit.outputs:
            place = self.path / name
            if place.is_dir():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)

    def _differs(self, unit: Unit, record: dict[str, Any]) -> list[str]:
        """Which settings and inputs of an interrupted unit are no longer what its record says."""
        inputs = record.get("inputs", {})
        changed = _differences(record.get("settings"), without_secrets(unit.settings))[:4]
        return changed + [key for key in unit.inputs if self._id(key) != inputs.get(key)]

    def _marks(self, unit: Unit) -> dict[str, str | None]:
        """A mark of every file below the unit's outputs. Raises where one was not made: a fault of ours."""
        marks: dict[str, str | None] = {}
        for name in unit.outputs:
            place = self.path / name
            files = sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]
            if not all(path.is_file() for path in files):
                raise FileNotFoundError(f"{place} was not made by {unit.key}")
            marks |= {path.relative_to(self.path).as_posix(): _mark(path) for path in files}
        return marks

    def _id(self, key: str) -> str | None:
        return (self.record(key) or {}).get("id")

    def _place(self, key: str) -> Path:
        return self.path / RECORDS / f"{key.replace(' ', '.')}.json"


def execute(units: Sequence[Unit], folder: RunFolder, say: Callable[[str], None]) -> list[str]:
    """Run what must run, in order, and say of every stage what happened. Returns the keys of the units that ran."""
    ran: list[str] = []
    for unit in units:
        folder.refuse(unit)  # before any of them runs: an earlier one may take the same change
    for stage, group in groupby(units, key=lambda unit: unit.stage):
        own = list(group)
        reasons = {unit.key: folder.reason(unit) for unit in own}
        if not any(reasons.values()):
            say(f"{stage}: unchanged, skipped")
            continue
        for unit in own:
            if not reasons[unit.key]:
                say(f"{unit.key}: unchanged, skipped")
                continue
            if not unit.ranks and several_ranks():
                raise UserError(
                    f"{unit.key}: one process does this ({reasons[unit.key]}); run `draftsmith {unit.stage}` "
                    "without accelerate first"
                )
            say(f"{unit.key}: runs ({reasons[unit.key]})")
            seconds = folder.run(unit)
            ran.append(unit.key)
            say(f"{unit.key}: done in {seconds:.0f} s")
    return ran


def schedule(units: Sequence[Unit], folder: RunFolder) -> dict[str, str]:
    """For each unit why it would run, "" where it would be skipped; runs nothing."""
    reasons: dict[str, str] = {}
    for unit in units:
        running = [key for key, reason in reasons.items() if reason]
        reasons[unit.key] = folder.reason(unit, running)
    return reasons


def needed(units: Sequence[Unit], stage: str) -> list[Unit]:
    """The units of `stage` and all they rest on, in their order."""
    wanted = {unit.key for unit in units if unit.stage == stage}
    for unit in reversed(units):
        if unit.key in wanted:
            wanted |= set(unit.inputs)
    return [unit for unit in units if unit.key in wanted]


def stamp(path: Path, content: bool) -> str:
    """What changes when a file or folder outside the run folder does: names and sizes, and the content or the times.

    `content` reads every byte (text); without it the time of change stands for the content (weights of many gigabytes).
    A path that is not there has a stamp too: whoever reads it says what is wrong.
    """
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    entries: list[Any] = []
    for file in files:
        if not file.is_file():
            return "missing"
        about = file.stat()
        mark: Any = about.st_mtime_ns
        if content:
            with file.open("rb") as stream:
                mark = hashlib.file_digest(stream, "sha256").hexdigest()
        entries.append([file.relative_to(path).as_posix() if path.is_dir() else file.name, about.st_size, mark])
    return digest(entries)


def _sound(record: Any) -> bool:
    """Whether a record is of the form that `RunFolder.run` writes."""
    if not isinstance(record, dict) or not isinstance(record.get("inputs"), dict):
        return False
    return "id" not in record or isinstance(record.get("outputs"), dict)


def disk_is_full(error: Exception) -> bool:
    """Whether it says that there is no room, in whatever way."""
    full = isinstance(error, OSError) and error.errno in FULL
    return not isinstance(error, UserError) and (full or any(text in str(error) for text in FULL_TEXTS))


def _differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Dotted names of the settings in which two nested values differ. Tuples equal lists, as in JSON."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*new, *(key for key in old if key not in new)]
        return [name for key in keys for name in _differences(old.get(key), new.get(key), f"{prefix}{key}.")]
    same = json.dumps(old, sort_keys=True, default=str) == json.dumps(new, sort_keys=True, default=str)
    return [] if same else [prefix.rstrip(".") or "settings"]


def _mark(path: Path) -> str | None:
    """Size and, unless the file is large, digest of its content; shards and large weights have checksums of their own."""
    if not path.is_file():
        return None
    size = path.stat().st_size
    if size > DIGESTED_BYTES:
        return str(size)
    with path.open("rb") as stream:
        return f"{size} {hashlib.file_digest(stream, xxhash.xxh3_64).hexdigest()}"


def _yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=110)
