"""Dependencies point one way (docs/conventions.md), as the import statements of every module say."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BASE = {"errors", "settings", "files", "progress"}
STAGES = {"data", "models", "train", "eval"}
#: folder -> the folders, or single modules, that it may import beside itself and the base modules
ALLOWED = {"models": set(), "data": {"models.target"}, "eval": {"models"}, "train": {"models", "data", "eval"}}


def imports(path: Path) -> set[str]:
    """Modules of draftsmith that a file imports, without the leading "draftsmith."; "" is the package itself."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            names = [node.module or ""]
            if node.module == "draftsmith":
                names = [f"draftsmith.{alias.name}" for alias in node.names if not alias.name.startswith("__")]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.removeprefix("draftsmith.") for name in names if name.startswith("draftsmith.")}
    return found


def allowed(folder: str, module: str) -> bool:
    if module.split(".")[0] in (BASE | {folder}):
        return True
    return any(module == name or module.startswith(f"{name}.") for name in ALLOWED[folder])


@pytest.mark.parametrize("folder", sorted(STAGES))
def test_a_stage_imports_only_what_lies_below_it(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"{folder} has no modules: the test would hold nothing"
    wrong = {
        (path.relative_to(ROOT).as_posix(), module)
        for path in files
        for module in imports(path)
        if not allowed(folder, module)
    }
    assert not wrong


def test_the_base_modules_import_nothing_of_draftsmith() -> None:
    for name in BASE:
        assert imports(ROOT / "draftsmith" / f"{name}.py") <= BASE


def test_nobody_imports_the_command_line() -> None:
    files = [path for folder in (*STAGES, "draftsmith") for path in (ROOT / folder).rglob("*.py")]
    importers = {path.name for path in files if any(module.split(".")[0] == "cli" for module in imports(path))}
    assert importers == {"__main__.py"}


def test_a_forbidden_import_would_be_seen(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("def late():\n    from draftsmith.train.loop import train\n    import draftsmith.cli\n")
    assert imports(file) == {"train.loop", "cli"}
    assert not allowed("models", "train.loop")
    assert not allowed("data", "models.draft")
    assert allowed("data", "models.target")
