"""The command line as a user meets it: exit codes, one line on stderr, instant help."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftsmith.cli import main
from draftsmith.run import RunFolder


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of one command."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def one_line(err: str) -> str:
    assert err.count("\n") == 1, err
    assert err.startswith("draftsmith: ")
    return err


def test_help_needs_neither_torch_nor_the_schema_and_takes_less_than_three_seconds() -> None:
    """1.5 s is the aim; the bound leaves room for a busy machine."""
    program = (
        "import sys\nfrom draftsmith.cli import main\ntry: main(['--help'])\nfinally: print('torch' in sys.modules)"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert time.monotonic() - started < 3.0
    assert done.stdout.strip().endswith("False")
    for command in (
        "demo",
        "target",
        "prepare",
        "cache",
        "distill",
        "train-eagle",
        "eval-acceptance",
        "tune",
        "theory",
        "report",
        "plan",
        "regenerate",
    ):
        assert command in done.stdout


STAGES = ["target", "prepare", "cache", "distill", "train-eagle", "eval-acceptance", "tune"]


@pytest.mark.parametrize("command", [*STAGES, "plan", "regenerate"])
def test_a_missing_config_is_one_line_and_exit_code_2(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = call(capsys, command, str(tmp_path / "absent.yaml"))
    assert code == 2
    assert "absent.yaml: no such config" in one_line(err)


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("evaluation: {K: 0}", [], "evaluation.K"),
        ("", ["evaluation.K=0"], "evaluation.K"),
        ("datta: {}", [], "did you mean data?"),
        ("", ["distill.tokns=5"], "did you mean distill.tokens?"),
        ("seed: [", [], "not valid YAML"),
    ],
)
def test_a_wrong_config_is_one_line_and_exit_code_2(
    text: str, overrides: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "x.yaml").write_text(text)
    code, _, err = call(capsys, "eval-acceptance", str(tmp_path / "x.yaml"), *overrides)
    assert code == 2
    assert said in one_line(err)


def test_a_target_folder_without_weights_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "x.yaml").write_text(f"run_root: {tmp_path}/runs\ntarget: {{path: {tmp_path}/model}}\n")
    for command in ("target", "cache"):
        code, _, err = call(capsys, command, str(tmp_path / "x.yaml"))
        assert code == 2
        assert "target.path" in one_line(err)
        assert "no *.safetensors" in err


def test_a_target_path_that_is_not_there_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "x.yaml").write_text(f"run_root: {tmp_path}/runs\ntarget: {{path: {tmp_path}/absent}}\n")
    code, _, err = call(capsys, "target", str(tmp_path / "x.yaml"))
    assert code == 2
    assert "absent does not exist" in one_line(err)


def test_an_empty_corpus_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    source = f"{{kind: json, path: {tmp_path}/empty.jsonl}}"
    (tmp_path / "x.yaml").write_text(f"run_root: {tmp_path}/runs\ndata: {{sources: [{source}]}}\n")
    code, out, err = call(capsys, "target", str(tmp_path / "x.yaml"))
    assert code == 2
    assert "data.sources" in one_line(err)
    assert "target: runs (not done yet)" in out


def test_a_run_folder_that_cannot_be_made_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "x.yaml").write_text(f"run_root: {tmp_path}/file\n")
    code, _, err = call(capsys, "target", str(tmp_path / "x.yaml"))
    assert code == 2
    assert "run_root" in one_line(err)


def test_a_report_of_nothing_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "absent"):
        code, _, err = call(capsys, "report", str(place))
        assert code == 2
        assert str(place) in one_line(err)


def test_a_cache_that_is_not_there_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for command in ("cache-info", "cache-verify"):
        code, _, err = call(capsys, command, str(tmp_path))
        assert code == 2
        assert "no cache" in one_line(err)


def test_a_disk_that_is_full_before_any_stage_begins_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "x.yaml").write_text(f"run_root: {tmp_path}/runs\n")
    monkeypatch.setattr(RunFolder, "describe", full)
    code, _, err = call(capsys, "target", str(tmp_path / "x.yaml"))
    assert code == 2
    assert "No space left on device); free some space and run the same command again" in one_line(err)


def test_a_fault_of_ours_is_a_traceback_and_exit_code_1() -> None:
    program = (
        "import draftsmith.cli as cli\n"
        "def broken(*_): raise KeyError('ours')\n"
        "cli._load = broken\n"
        "cli.main(['target', 'any.yaml'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "KeyError: 'ours'" in done.stderr


def test_the_run_folder_says_what_the_user_set_and_what_followed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "x.yaml").write_text(f"run_root: {tmp_path}/runs\ntarget: {{path: {tmp_path}/absent}}\n")
    call(capsys, "target", str(tmp_path / "x.yaml"), "seed=7")
    run = tmp_path / "runs" / "x"
    assert "seed: 7" in (run / "run.yaml").read_text()
    assert "evaluation" not in (run / "run.yaml").read_text()
    assert "evaluation" in (run / "resolved.yaml").read_text()
    environment = (run / "environment.json").read_text()
    assert json.loads(environment)["packages"]["torch"]
    assert str(Path.home()) not in environment


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_any_stage_is_one_line_that_says_how_to_go_on_and_its_exit_code(
    number: int, code: int, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith.work.Work.train_target", lambda work: os.kill(os.getpid(), number))
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}')
    source = f"{{kind: json, path: {tmp_path}/rows.jsonl}}"
    (tmp_path / "x.yaml").write_text(f"run_root: {tmp_path}/runs\ndata: {{sources: [{source}]}}\n")
    found, _, err = call(capsys, "target", str(tmp_path / "x.yaml"))
    assert found == code
    assert "the same command continues" in one_line(err)


def test_code_from_a_model_is_off_and_loud_when_it_is_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "x.yaml").write_text(f"run_root: {tmp_path}/runs\ntarget: {{path: {tmp_path}/model}}\n")
    _, out, _ = call(capsys, "target", str(tmp_path / "x.yaml"))
    assert "WARNING" not in out
    _, out, _ = call(capsys, "target", str(tmp_path / "x.yaml"), "target.trust_remote_code=true")
    assert f"WARNING: target.trust_remote_code is on: code that comes with {tmp_path}/model runs as you" in out
