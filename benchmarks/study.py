"""What the studies share: a journal of finished work, so that an ended study goes on where it stopped; the workers that do what is
missing; the study's file and page. Knows no study.
"""

import argparse
import json
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from draftsmith.data.rows import Rows
from draftsmith.environment import describe_environment
from draftsmith.errors import UserError
from draftsmith.files import publish_json, publish_text
from draftsmith.models.target import Target
from draftsmith.serving import target_of

Entry = dict[str, Any]
DOCS = Path("docs")


@dataclass(frozen=True)
class Plan:
    """What all jobs of a study share. rows, prompts: per domain, for teacher-forced and for decoded acceptance."""

    run: Path
    folder: Path
    rows: int
    prompts: int
    new_tokens: int

    def claim(self) -> None:
        """Note in the folder of what its lines are. Raises UserError where it has lines of another target or of other prompts."""
        sizes = {name: getattr(self, name) for name in ("rows", "prompts", "new_tokens")}
        path, of = self.folder / "plan.json", {"target": opened(self.run)[0].fingerprint()} | sizes
        if not path.is_file():
            publish_json(path, of)
        elif json.loads(path.read_text(encoding="utf-8")) != of:
            raise UserError(f"{path}: this folder has lines of another target or other prompts; give another --folder")


class Journal:
    """Finished work, one JSON object a line. name: which work an entry is of."""

    def __init__(self, path: Path, name: Callable[[Entry], Hashable]) -> None:
        self.path, self.name = path, name
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        self.found: dict[Hashable, Entry] = {}
        for line in text.splitlines():
            with suppress(json.JSONDecodeError):  # what a kill cut off is done again
                entry = json.loads(line)
                self.found[name(entry)] = entry
        self.mend = "" if text.endswith("\n") or not text else "\n"

    def add(self, entry: Entry) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as out:
            out.write(f"{self.mend}{json.dumps(entry)}\n")
        self.mend = ""
        self.found[self.name(entry)] = entry

    def of(self, names: Iterable[Hashable]) -> list[Entry]:
        """The entries of these names that are there, in their order."""
        return [self.found[name] for name in names if name in self.found]


def do_missing(
    journal: Journal, todo: Mapping[Any, tuple[Any, ...]], work: Callable[..., Entry], workers: Executor
) -> None:
    """`work(*todo[name])` for every name that the journal lacks, in this order; its line as soon as it is done."""
    missing = {name: given for name, given in todo.items() if name not in journal.found}
    print(f"{len(todo) - len(missing)} of {len(todo)} are done", flush=True)
    started, revision = time.monotonic(), describe_environment()["revision"]
    with workers:
        running = {workers.submit(work, *given): name for name, given in missing.items()}
        for count, future in enumerate(as_completed(running), start=1):
            journal.add(future.result() | {"revision": revision})
            left = (time.monotonic() - started) / 60 / count * (len(missing) - count)
            print(f"{count}/{len(missing)} {running[future]}; {left:.0f} minutes left", flush=True)


def revisions(entries: Iterable[Entry]) -> list[str]:
    """Of which revisions of the code these lines are."""
    return sorted({str(entry.get("revision", "not noted")) for entry in entries})


def processes(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"))


@cache
def opened(run: Path) -> tuple[Target, Rows]:
    """The target and the held-out rows of a run, loaded once in each process, which computes with one thread."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    return Target.load(target_of(run)), Rows.open(run / "rows", "held_out")


def study_parser(about: str | None, folder: str, tokens: int, seeds: int, workers: int) -> argparse.ArgumentParser:
    """The options that all studies of trained drafts have."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/demo"), help="a finished run")
    parser.add_argument("--folder", type=Path, default=Path(folder), help="where finished work is noted")
    parser.add_argument("--tokens", type=int, default=tokens, help="that every draft sees")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--workers", type=int, default=workers, help="drafts trained at once, a thread each")
    parser.add_argument("--quick", action="store_true", help="a smoke test: few drafts, tokens and prompts, no page")
    return parser


#: Options that change no number: where things lie, how many work, and that nothing is measured.
PLACES = ("folder", "environment", "environments", "workers", "page")


def command(target: str, parser: argparse.ArgumentParser, given: argparse.Namespace) -> str:
    """The make command that gives this result again; of the run its name alone."""
    names = [name for name in vars(given) if name not in ("run", *PLACES)]
    changed = {name: value for name in names if (value := getattr(given, name)) != parser.get_default(name)}
    options = " ".join(f"--{name}{_words(value)}" for name, value in changed.items())
    run = "" if given.run == parser.get_default("run") else f" RUN=runs/{given.run.name}"
    return f"make {target}{run}" + (f' ARGS="{options}"' if options else "")


def _words(value: Any) -> str:
    """An option's values, each with a space before it; of a switch there are none. A path is told from the working directory, one
    outside of it by its name: where a machine keeps things is nobody's business."""
    values = value if isinstance(value, list) else [] if value is True else [value]
    return "".join(f" {_told(item) if isinstance(item, Path) else item}" for item in values)


def _told(path: Path) -> str:
    whole, here = path.resolve(), Path.cwd().resolve()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else whole.name


def publish_study(
    name: str,
    page: str,
    command: str,
    rows: list[Entry],
    text: Callable[[Entry], str],
    smoke: Path | None = None,
    about: Entry | None = None,
) -> None:
    """docs/studies/<name>.json, a row a line, and docs/<page>.md, made from it; of a smoke test both in its folder. about: what
    else the page says of all rows."""
    made = {"environment": describe_environment(), "command": command}
    study = rounded(made | (about or {}) | {"rows": rows})
    places = (DOCS / "studies", DOCS) if smoke is None else (smoke, smoke)
    publish_text(places[0] / f"{name}.json", study_text(study))
    publish_text(places[1] / f"{page}.md", text(study))
    print(f"written: {places[1] / page}.md", flush=True)


def study_text(study: Entry) -> str:
    """A study as JSON, a row a line."""
    head = json.dumps(study | {"rows": []}, indent=2, ensure_ascii=False).removesuffix("[]\n}")
    rows = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in study["rows"])
    return f"{head}[\n{rows}\n  ]\n}}\n"


def rounded(value: Any) -> Any:
    """The same with eight significant digits: more than any measurement has."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value
