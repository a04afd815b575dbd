"""What data and configs must never be able to do: run code, leave a secret behind."""

import ast
from pathlib import Path
from typing import Any

import pytest

import draftsmith
from draftsmith.config import Config, Loaded
from draftsmith.environment import describe_environment
from draftsmith.run import RunFolder, Unit
from draftsmith.settings import without_secrets
from draftsmith.tracking import Tracking

ROOT = Path(draftsmith.__file__).parents[1]
SOURCES = [
    path
    for folder in ("draftsmith", "data", "models", "train", "eval", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
]
PICKLES = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def runs_code(tree: ast.AST) -> list[str]:
    """Calls and imports that can run what they read."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
            if names != [
                "UnpicklingError",
                "pickle",
            ]:  # the error that `torch.load` raises for what is more than tensors
                found += [name for name in names if name.split(".")[0] in PICKLES]
        if not isinstance(node, ast.Call):
            continue
        name, options = ast.unparse(node.func), {option.arg: ast.unparse(option.value) for option in node.keywords}
        if name in ("eval", "exec") or name.endswith("yaml.unsafe_load"):
            found.append(name)
        if name == "torch.load" and options.get("weights_only") != "True":
            found.append(name)
        if options.get("allow_pickle") == "True" or options.get("trust_remote_code") == "True":
            found.append(f"{name} with {options}")
        if name == "yaml.load" and not any("Loader" in ast.unparse(part) for part in node.args[1:]):
            found.append(name)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_unpickles_or_evaluates_what_it_reads(path: Path) -> None:
    assert runs_code(ast.parse(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "line",
    ["import pickle", "torch.load(p)", "np.load(p, allow_pickle=True)", "yaml.load(t)", "f(trust_remote_code=True)"],
)
def test_the_search_finds_what_it_looks_for(line: str) -> None:
    assert runs_code(ast.parse(line))


SECRETS = ("hf_abcdefgh12345678", "wandb-0123456789abcdef")


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRETS[0])
    monkeypatch.setenv("WANDB_API_KEY", SECRETS[1])


def test_settings_keep_their_numbers_and_lose_their_secrets(secrets: None) -> None:
    values = {
        "tokens": 5,
        "batch_tokens": 6,
        "api_key": "abc",
        "deep": [{"password": "x", "path": f"hub/{SECRETS[0]}"}],
    }
    assert without_secrets(values) == {
        "tokens": 5, "batch_tokens": 6, "api_key": "(left out)", "deep": [{"password": "(left out)", "path": "(left out)"}]
    }  # fmt: skip


def test_no_file_of_a_run_and_no_tracker_gets_a_secret(
    secrets: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {
        "name": "x",
        "target": {"path": f"org/model?{SECRETS[0]}"},
        "tracking": {"project": SECRETS[1]},
    }
    folder = RunFolder(tmp_path)
    config = Config.model_validate(given)
    folder.describe(Loaded(config, given))
    folder.run(Unit("target", "", given["target"], (), (), lambda: None))
    (tmp_path / "environment.json").write_text(str(describe_environment()))
    stored: dict[str, Any] = {}

    class Keeper:
        def store_init_configuration(self, values: dict[str, Any]) -> None:
            stored.update(values)

        def log(self, values: dict[str, float], step: int) -> None: ...

    tracking = Tracking((), "p", tmp_path, config.model_dump(mode="json"))
    tracking._names = ("keeper",)
    monkeypatch.setattr(tracking, "_create", lambda name: Keeper())
    tracking.log("x")({"loss": 1.0}, 1)
    assert stored["tracking.project"] == "(left out)"
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()] + [str(stored)]
    assert len(written) >= 4
    assert not [text for text in written for secret in SECRETS if secret in text]
