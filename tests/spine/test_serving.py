"""`draftsmith export` and `draftsmith import`: the pieces of a run are found, and what is wrong is one line."""

import json

import pytest
from exports import saved
from kit import tiny_target_folder

from draftsmith.cli import main
from draftsmith.models.eagle import EagleHead
from draftsmith.models.target import Target


def run_folder(tmp_path, path="null"):
    """A run with one head, evaluated."""
    run = tmp_path / "run"
    tiny_target_folder(tmp_path).rename(tmp_path / "target")
    if path == "null":
        run.mkdir()
        (tmp_path / "target").rename(run / "target")
    target = Target.load(run / "target" if path == "null" else tmp_path / "target")
    saved(run / "eagle" / "mine", target)
    (run / "resolved.yaml").write_text(f"target: {{path: {path}}}\n")
    (run / "eval").mkdir()
    entry = {"domain": "code", "temperature": 0.0, "K": 3, "tokens_per_verify": {"value": 2.0, "low": 1.5, "high": 2.5}}
    (run / "eval" / "mine.json").write_text(json.dumps({"schema": 1, "results": [entry]}))
    return run, target


def command(*arguments):
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return end.value.code


def test_a_head_of_a_run_is_exported_with_its_evaluation_and_imported_again(tmp_path, capsys):
    run, target = run_folder(tmp_path)
    assert command("export", run, "--draft", "mine", "--to", "vllm") == 0
    folder = run / "export" / "vllm" / "mine"
    assert "2.00 (1.50 to 2.50)" in (folder / "README.md").read_text()
    assert f'"model": "{folder}", "num_speculative_tokens": 3' in (folder / "README.md").read_text()
    assert command("import", folder, "--target", run / "target", "--out", tmp_path / "back") == 0
    assert "import: eagle3 at" in capsys.readouterr().out
    assert EagleHead.load(tmp_path / "back", target).config == EagleHead.load(run / "eagle" / "mine", target).config


def test_what_is_not_there_is_one_line(tmp_path, capsys):
    run, _ = run_folder(tmp_path, str(tmp_path / "target"))
    (run / "eval" / "mine.json").unlink()
    assert command("export", run, "--draft", "mine", "--to", "sglang", "--out", tmp_path / "out") == 0
    assert "was not evaluated" in capsys.readouterr().out
    for arguments, said in (
        (
            ("export", run, "--draft", "other", "--to", "vllm"),
            "no trained draft 'other'; give one of mine, or a folder",
        ),
        (("export", run, "--draft", "mine", "--to", "gguf"), "no such format"),
        (("export", tmp_path / "no", "--draft", "mine", "--to", "vllm"), "no such run folder"),
        (
            (
                "import",
                tmp_path / "out",
                "--target",
                tmp_path / "target",
                "--out",
                tmp_path / "x",
                "--nested-ids",
                "both",
            ),
            "both",
        ),
        (("import", tmp_path / "no", "--target", tmp_path / "target", "--out", tmp_path / "x"), "no such folder"),
    ):
        assert command(*arguments) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.strip().splitlines()[-1].startswith("draftsmith: ")
