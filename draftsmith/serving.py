"""`draftsmith export` and `draftsmith import`: from a finished run to an engine's folder, and from somebody's head to ours.

Finds the pieces in the run folder; the formats themselves are `draftsmith.models.serving`'s.
"""

import os
from collections.abc import Callable
from pathlib import Path

import yaml

from draftsmith.errors import UserError
from draftsmith.eval.settings import checked_folder, is_folder, result_name
from draftsmith.files import check_folder_place
from draftsmith.run import RunFolder, stamp

Say = Callable[[str], None]
#: Drafts without weights of their own, and what to do instead.
UNTRAINED = {
    "prompt-lookup": "it has no weights: engines have it built in (vLLM: method ngram, SGLang: NGRAM, transformers: "
    "prompt_lookup_num_tokens)",
    "oracle": "it is the target itself: give the engine the target as its draft model",
}


def export_run(run: Path, draft: str, fmt: str, out: Path | None, say: Say) -> Path:
    """Export a draft of a run, with its evaluation if there is one, to `out` or `<run>/export/<fmt>/<draft>`.

    draft: the name of a trained one, or a folder (with a slash), such as `draftsmith import` writes.
    """
    from draftsmith.models.serving.export import export_draft
    from draftsmith.models.target import Target

    _no_bars()
    name, folder = result_name(draft), draft_folder(run, draft)
    results = run / "eval" / f"{name}.json"
    if why := _unfit(results, run, draft, folder):
        say(f"export: {why}; its README will state no expected tokens per verify")
    place = out if out is not None else run / "export" / fmt / name
    check_folder_place(place)  # before the target is read
    target = Target.load(target_of(run))
    made = export_draft(folder, target, fmt, place, results=None if why else results)
    say(f"export: {made}; README.md there says how to start the engine")
    return made


def _unfit(results: Path, run: Path, draft: str, folder: Path) -> str:
    """Why a draft's evaluation says nothing of it as it is now; "" where it does, or where the run does not know of what it was."""
    if not results.exists():
        return f"{results.stem} was not evaluated"
    stages = RunFolder(run)
    record = stages.record(f"eval-acceptance {results.stem}")
    if record is None:
        return ""
    settings = record.get("settings")
    measured = settings.get("content") if isinstance(settings, dict) else None
    same = measured == ([stamp(folder, content=False)] if is_folder(draft) else None)
    if same and all((stages.record(key) or {}).get("id") == known for key, known in record["inputs"].items()):
        return ""
    return f"{results.stem} has changed since it was evaluated"


def import_head(folder: Path, target: str, out: Path, nested_ids: str, say: Say) -> Path:
    """Import somebody's head to `out`, and say what was decided about it."""
    from draftsmith.models.serving.importing import import_draft

    _no_bars()
    if nested_ids not in ("output", "input"):
        raise UserError(f"--nested-ids {nested_ids}: must be output or input")
    done = import_draft(folder, target, out, nested_ids="input" if nested_ids == "input" else "output")
    for note in done.notes:
        say(f"import: {note}")
    say(
        f"import: {done.kind} at {done.path}; to measure it, put that folder (with a slash) into evaluation.drafts; to train on"
        " from it, set eagle.NAME.start to it"
    )
    return done.path


def _no_bars() -> None:
    """No bars of single files and no reports of the library: what is wrong is said in one line."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def draft_folder(run: Path, draft: str) -> Path:
    """The folder of a run's trained draft, or the folder that `draft` is. Raises UserError naming those that there are."""
    if not os.path.isdir(run):  # pathlib's raises for a name too long
        raise UserError(f"{run}: no such run folder; name one that a training wrote, such as runs/demo")
    if draft in UNTRAINED:
        raise UserError(f"--draft {draft}: nothing to export, {UNTRAINED[draft]}")
    if is_folder(draft):
        return checked_folder(draft, "--draft")
    folders = {
        path.name: path for kind in ("eagle", "draft") for path in sorted((run / kind).glob("*")) if path.is_dir()
    }
    known = {name: path for name, path in folders.items() if (path / "config.json").exists()}
    if draft not in known:
        there = ", ".join(sorted(known))
        remedy = (
            f"give one of {there}, or a folder (with a slash)"
            if known
            else "train one (draftsmith distill CONFIG, draftsmith train-eagle CONFIG), or give a folder (with a slash)"
        )
        raise UserError(f"{run}: no trained draft {draft!r}; {remedy}")
    if (known[draft] / "checkpoints").exists():
        raise UserError(
            f"{known[draft]}: its training is not finished; run the command that trains it again, then export"
        )
    return known[draft]


def target_of(run: Path) -> str:
    """Folder or hub name of the target that a run's drafts were made for. Raises UserError."""
    resolved = run / "resolved.yaml"
    try:
        path = yaml.safe_load(resolved.read_text(encoding="utf-8"))["target"]["path"]
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{resolved}: not readable as a run's settings; name the folder of a finished run") from error
    if path is None:
        return str(run / "target")
    if not isinstance(path, str):
        raise UserError(f"{resolved}: target.path is {path!r}; it must be a folder, a hub name or null: correct it")
    local = Path(path).expanduser()
    return str(local) if local.exists() else path
