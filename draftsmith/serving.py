"""`draftsmith export` and `draftsmith import`: from a finished run to an engine's folder, and from somebody's head to ours.

Finds the pieces in the run folder; the formats themselves are `draftsmith.models.serving`'s.
"""

from collections.abc import Callable
from pathlib import Path

import yaml

from draftsmith.errors import UserError

Say = Callable[[str], None]


def export_run(run: Path, draft: str, fmt: str, out: Path | None, say: Say) -> Path:
    """Export a draft of a run, with its evaluation if there is one, to `out` or `<run>/export/<fmt>/<draft>`."""
    from draftsmith.models.serving.export import export_draft
    from draftsmith.models.target import Target

    folder, results = draft_folder(run, draft), run / "eval" / f"{draft}.json"
    if not results.exists():
        say(f"export: {draft} was not evaluated; its README will state no expected tokens per verify")
    place = out if out is not None else run / "export" / fmt / draft
    target = Target.load(target_of(run))
    made = export_draft(folder, target, fmt, place, results=results if results.exists() else None)
    say(f"export: {made}; README.md there says how to start the engine")
    return made


def import_head(folder: Path, target: str, out: Path, nested_ids: str, say: Say) -> Path:
    """Import somebody's head to `out`, and say what was decided about it."""
    from draftsmith.models.serving.importing import import_draft

    if nested_ids not in ("output", "input"):
        raise UserError(f"--nested-ids {nested_ids}: must be output or input")
    done = import_draft(folder, target, out, nested_ids="input" if nested_ids == "input" else "output")
    for note in done.notes:
        say(f"import: {note}")
    say(f"import: {done.kind} at {done.path}; to train on from it, set eagle.NAME.start to that folder")
    return done.path


def draft_folder(run: Path, draft: str) -> Path:
    """The folder of a run's trained draft. Raises UserError naming those that there are."""
    folders = {
        path.name: path for kind in ("eagle", "draft") for path in sorted((run / kind).glob("*")) if path.is_dir()
    }
    known = {name: path for name, path in folders.items() if (path / "config.json").exists()}
    if draft not in known:
        there = ", ".join(sorted(known)) or "none"
        raise UserError(f"{run}: no trained draft {draft!r} (there are: {there}); give --draft, or train it first")
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
    local = Path(path).expanduser()
    return str(local) if local.exists() else str(path)
