"""`draftsmith export` and `draftsmith import`: the pieces of a run are found, and what is wrong is one line."""

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
from exports import saved
from kit import tiny_target_folder

from draftsmith.cli import main
from draftsmith.errors import UserError
from draftsmith.eval.decode import as_drafter
from draftsmith.models.eagle import EagleHead
from draftsmith.models.target import Target
from draftsmith.run import stamp


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


def test_an_evaluation_of_earlier_weights_or_of_another_folder_is_not_told_as_the_drafts_own(tmp_path, capsys):
    run, _ = run_folder(tmp_path)
    shutil.copytree(run / "eagle" / "mine", tmp_path / "theirs" / "mine")
    (run / "stages").mkdir()
    trained, evaluated = (run / "stages" / f"{key}.json" for key in ("train-eagle.mine", "eval-acceptance.mine"))
    trained.write_text(json.dumps({"id": "now", "inputs": {}, "outputs": {}}))

    def told(draft, inputs, **settings):
        record = {"id": "x", "inputs": inputs, "outputs": {}, "settings": settings}
        evaluated.write_text(json.dumps(record))
        assert command("export", run, "--draft", draft, "--to", "vllm", "--out", tmp_path / "out") == 0
        said = "2.00 (1.50 to 2.50)" in (tmp_path / "out" / "README.md").read_text()
        assert ("has changed since it was evaluated" in capsys.readouterr().out) != said
        return said

    folder = tmp_path / "theirs" / "mine"
    assert told("mine", {"train-eagle mine": "now"})
    assert not told("mine", {"train-eagle mine": "before"})
    assert not told(str(folder), {}), "the run's own draft was evaluated, not this one"
    assert told(str(folder), {}, content=[stamp(folder, content=False)])
    assert not told("mine", {}, content=[stamp(folder, content=False)])


def test_a_head_whose_training_is_not_finished_is_not_exported(tmp_path, capsys):
    run, _ = run_folder(tmp_path)
    (run / "eagle" / "mine" / "checkpoints").mkdir()
    assert command("export", run, "--draft", "mine", "--to", "vllm") == 2
    assert "its training is not finished" in capsys.readouterr().err
    assert not (run / "export").exists()


def test_an_exported_head_given_as_a_draft_is_said_to_be_imported_first(tmp_path):
    run, target = run_folder(tmp_path)
    assert command("export", run, "--draft", "mine", "--to", "vllm") == 0
    with pytest.raises(
        UserError, match=r"a head in an engine's layout \(LlamaForCausalLMEagle3\); `draftsmith import`"
    ):
        as_drafter(run / "export" / "vllm" / "mine", target)


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


def test_a_place_that_no_folder_can_have_is_one_line_of_both_commands_and_nothing_is_made(
    tmp_path, capsys, monkeypatch
):
    run, _ = run_folder(tmp_path)
    published = tmp_path / "published"
    assert command("export", run, "--draft", "mine", "--to", "vllm", "--out", published) == 0
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "x")
    (tmp_path / "locked").mkdir()
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path).name != "locked" and access(path, mode)
    )  # root may all
    before = sorted(tmp_path.rglob("*"))
    for place, said in (
        ("file", "is a file"),
        ("file/x/y", "is a file"),
        ("dangling", "a link to nothing"),
        ("dangling/x", "a link to nothing"),
        ("locked/x", "may not write"),
        ("x" * 300, "File name too long"),
        ("x" * 250, "File name too long"),
    ):
        for arguments in (
            ("export", run, "--draft", "mine", "--to", "vllm"),
            ("import", published, "--target", run / "target"),
        ):
            capsys.readouterr()
            assert command(*arguments, "--out", tmp_path / place) == 2
            [line] = capsys.readouterr().err.splitlines()
            assert line.startswith("draftsmith: ")
            assert said in line
            assert "give another" in line
    assert sorted(tmp_path.rglob("*")) == before


def test_who_may_read_an_export_and_an_import_is_as_the_umask_says_and_stderr_is_empty(tmp_path, capsys):
    run, _ = run_folder(tmp_path)
    for mask, mode in ((0o077, 0o600), (0o002, 0o664)):
        before = os.umask(mask)
        try:
            out, back = tmp_path / f"out{mask}", tmp_path / f"back{mask}"
            capsys.readouterr()
            assert command("export", run, "--draft", "mine", "--to", "vllm", "--out", out) == 0
            assert command("import", out, "--target", run / "target", "--out", back) == 0
        finally:
            os.umask(before)
        assert capsys.readouterr().err == ""
        assert {stat.S_IMODE(path.stat().st_mode) for folder in (out, back) for path in folder.iterdir()} == {mode}


def test_launch_lines_are_right_in_any_folder(tmp_path, monkeypatch):
    """A README says where target and draft are whatever folder it is read in."""
    run_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    for fmt in ("speculators", "sglang", "trtllm", "transformers"):  # vllm has the line of speculators
        assert command("export", "run", "--draft", "mine", "--to", fmt, "--out", f"out/{fmt}") == 0
        text = (tmp_path / "out" / fmt / "README.md").read_text()
        start = text.split("## Start")[1].split("```")[1]
        assert str(tmp_path / "run" / "target") in start
        assert str(tmp_path / "out" / fmt) in start
        assert "Paths are absolute" in text
    verifier = json.loads((tmp_path / "out" / "speculators" / "config.json").read_text())["speculators_config"][
        "verifier"
    ]
    assert verifier["name_or_path"] == str(tmp_path / "run" / "target")
    assert str(tmp_path / "out" / "trtllm") in (tmp_path / "out" / "trtllm" / "speculative.yaml").read_text()


def test_what_cannot_be_exported_or_imported_names_its_folder_and_a_remedy(tmp_path, capsys):
    run, _ = run_folder(tmp_path)
    published = tmp_path / "published"
    assert command("export", run, "--draft", "mine", "--to", "vllm", "--out", published) == 0
    wide = tiny_target_folder(tmp_path, seed=1, hidden_size=64, head_dim=16)
    broken = shutil.copytree(wide, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"vocab_size": 99}))
    export, to = ("export", run, "--to", "vllm", "--draft"), tmp_path / "x"
    (run / "eval" / "mine.json").write_text('{"results": [{"domain": "x", "temperature": "hot"}]}')
    (tmp_path / "empty").mkdir()
    for arguments, said in (
        ((*export, "prompt-lookup"), "no weights: engines have it built in"),
        ((*export, "oracle"), "the target itself"),
        ((*export, "./nowhere"), "no folder of a draft"),
        ((*export, "mine"), "mine.json: not a result of eval-acceptance"),
        (("export", tmp_path / "empty", "--to", "vllm", "--draft", "mine"), "train one (draftsmith distill CONFIG"),
        (("import", published, "--target", "/nope"), "/nope: no such folder; give a model's folder or a hub name"),
        (("import", published, "--target", wide), f"{published}/config.json: hidden_size 32 for a target of width 64"),
        (
            ("import", published, "--target", broken),
            f"{broken}: lm_head.weight has shape (150, 64), config.json",
        ),
    ):
        capsys.readouterr()
        assert command(*arguments, "--out", to) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert said in line
    shutil.copytree(wide, tmp_path / "deep")
    config = json.loads((wide / "config.json").read_text())
    (tmp_path / "deep" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**7}))
    assert command("import", published, "--target", tmp_path / "deep", "--out", to) == 2
    assert "num_hidden_layers is more than" in capsys.readouterr().err
    assert not to.exists()
