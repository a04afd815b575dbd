"""Skipping: a unit runs when its settings, inputs or outputs changed, and only then. With fake work that counts its runs."""

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.errors import UserError
from draftsmith.run import RunFolder, Unit, execute, needed, schedule, stamp


class Bench:
    """Two stages and two heads on a tiny run folder: first -> second -> head a, head b."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder, self.lines = root, RunFolder(root), []
        self.settings = {"first": {"x": 1}, "second": {"deep": {"y": 2}}, "head a": {"z": 3}, "head b": {"z": 4}}

    def units(self) -> list[Unit]:
        def unit(stage: str, name: str, inputs: tuple[str, ...]) -> Unit:
            key, output = f"{stage} {name}".strip(), f"{stage}{name}"
            return Unit(stage, name, self.settings[key], inputs, (output,), self.work(output))

        return [
            unit("first", "", ()),
            unit("second", "", ("first",)),
            unit("head", "a", ("second",)),
            unit("head", "b", ("second",)),
        ]

    def work(self, output: str) -> Callable[[], None]:
        def write() -> None:
            (self.root / output).mkdir(parents=True, exist_ok=True)
            (self.root / output / "data").write_text("made")

        return write

    def run(self) -> list[str]:
        self.lines.clear()
        return execute(self.units(), self.folder, self.lines.append)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "run")


ALL = ["first", "second", "head a", "head b"]


def test_a_second_run_skips_every_stage_and_says_so(bench: Bench) -> None:
    assert bench.run() == ALL
    assert bench.run() == []
    assert bench.lines == [f"{stage}: unchanged, skipped" for stage in ("first", "second", "head")]


def test_a_changed_setting_runs_its_unit_and_what_rests_on_it_and_is_named(bench: Bench) -> None:
    bench.run()
    bench.settings["second"] = {"deep": {"y": 3}}
    assert bench.run() == ["second", "head a", "head b"]
    assert "second: runs (changed: deep.y)" in bench.lines
    assert "first: unchanged, skipped" in bench.lines


def test_a_changed_head_leaves_the_other_head_alone(bench: Bench) -> None:
    bench.run()
    bench.settings["head a"] = {"z": 5}
    assert bench.run() == ["head a"]
    assert "head b: unchanged, skipped" in bench.lines


def test_a_run_again_with_equal_settings_makes_later_stages_stale(bench: Bench) -> None:
    bench.run()
    (bench.root / "first" / "data").unlink()
    assert bench.run() == ALL
    assert "first: runs (first/data is missing or changed)" in bench.lines
    assert "second: runs (first is new)" in bench.lines


def test_an_output_of_another_size_is_made_again(bench: Bench) -> None:
    bench.run()
    (bench.root / "headb" / "data").write_text("made, then damaged")
    assert bench.run() == ["head b"]


def test_tuples_and_lists_are_equal_settings(bench: Bench) -> None:
    bench.settings["first"] = {"x": (1, 2)}
    bench.run()
    bench.settings["first"] = {"x": [1, 2]}
    assert bench.run() == []


def test_a_failure_leaves_the_stage_to_be_run_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(bench, "work", lambda output: fail)
        with pytest.raises(RuntimeError, match="power cut"):
            bench.run()
    assert schedule(bench.units(), bench.folder)["first"] == "interrupted last time"
    assert bench.run() == ALL


def test_what_other_settings_left_in_an_output_is_removed_but_an_interrupted_run_keeps_its_files(bench: Bench) -> None:
    bench.run()
    stale = bench.root / "first" / "stale"
    stale.write_text("of the old settings")
    bench.settings["first"] = {"x": 2}
    record = bench.root / "stages" / "first.json"
    bench.run()
    assert not stale.exists()
    state = json.loads(record.read_text())
    del state["id"]  # as a kill in the middle leaves it
    record.write_text(json.dumps(state))
    stale.write_text("of the interrupted run")
    halves = [stale.with_name(".rows.json.k3x.tmp"), stale.parent.with_name(f".{stale.parent.name}.k3x.tmp")]
    for half in halves:
        half.write_text("of a file that was being written")
    bench.run()
    assert stale.exists()
    assert not any(half.exists() for half in halves)


def test_a_unit_that_resumes_keeps_its_folder_when_settings_change(tmp_path: Path) -> None:
    def unit(k: int) -> Unit:
        def write() -> None:
            (tmp_path / "cache").mkdir(exist_ok=True)
            (tmp_path / "cache" / f"shard-{k}").write_text("")

        return Unit("cache", "", {"k": k}, (), ("cache",), write, resumes=True)

    for k in (1, 2):
        execute([unit(k)], RunFolder(tmp_path), lambda line: None)
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"shard-1", "shard-2"}


def test_a_resuming_unit_that_refuses_a_change_leaves_everything_as_it_was(tmp_path: Path) -> None:
    def unit(k: int) -> Unit:
        def write() -> None:
            if k != 1:
                raise UserError("restore the setting")
            (tmp_path / "cache").write_text("whole")

        return Unit("cache", "", {"k": k}, (), ("cache",), write, resumes=True)

    execute([unit(1)], RunFolder(tmp_path), lambda line: None)
    with pytest.raises(UserError):
        execute([unit(2)], RunFolder(tmp_path), lambda line: None)
    assert execute([unit(1)], RunFolder(tmp_path), lambda line: None) == []


def test_the_schedule_foretells_what_runs_and_runs_nothing(bench: Bench) -> None:
    bench.run()
    bench.settings["second"] = {"deep": {"y": 3}}
    foretold = [key for key, reason in schedule(bench.units(), bench.folder).items() if reason]
    assert foretold == ["second", "head a", "head b"]
    assert bench.run() == foretold


def test_a_damaged_record_counts_as_no_record(bench: Bench) -> None:
    bench.run()
    (bench.root / "stages" / "head.b.json").write_text('{"id": "half a rec')
    assert bench.run() == ["head b"]


def test_a_stage_needs_what_it_rests_on_and_nothing_else(bench: Bench) -> None:
    assert [unit.key for unit in needed(bench.units(), "second")] == ["first", "second"]
    assert [unit.key for unit in needed(bench.units(), "head")] == ALL


def test_a_stamp_changes_with_the_content_and_not_with_the_time_of_a_text(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    before = stamp(tmp_path, content=True)
    file.touch()
    assert stamp(tmp_path, content=True) == before
    file.write_text("two")
    assert stamp(tmp_path, content=True) != before
    assert stamp(tmp_path / "absent", content=True) == "missing"


def test_a_second_run_in_a_folder_is_refused_while_the_first_lives_and_not_after_it_was_killed(tmp_path: Path) -> None:
    ready, tell = os.pipe()
    if (pid := os.fork()) == 0:
        with RunFolder(tmp_path).lock():
            os.write(tell, b"x")
            signal.pause()
    os.read(ready, 1)
    try:
        with pytest.raises(UserError, match=f"in use by process {pid} on "), RunFolder(tmp_path).lock():
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with RunFolder(tmp_path).lock():
        assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()


def test_an_interrupted_unit_begins_anew_when_settings_or_inputs_changed_and_says_so(bench: Bench) -> None:
    bench.run()
    record = bench.root / "stages" / "second.json"
    state = json.loads(record.read_text())
    del state["id"]  # as a kill in the middle leaves it
    record.write_text(json.dumps(state))
    half_done = bench.root / "second" / "half-done"
    half_done.write_text("")
    assert schedule(bench.units(), bench.folder)["second"] == "interrupted last time"
    (bench.root / "first" / "data").unlink()
    bench.run()
    assert not half_done.exists(), "it was made from another `first`"
    state = json.loads(record.read_text())
    del state["id"]
    record.write_text(json.dumps(state))
    bench.settings["second"] = {"deep": {"y": 7}}
    assert schedule(bench.units(), bench.folder)["second"] == "interrupted last time, then changed: deep.y; begins anew"


def test_saved_work_of_an_interrupted_unit_is_not_thrown_away_by_a_changed_setting_but_refused_by_name(
    tmp_path: Path,
) -> None:
    folder, step = RunFolder(tmp_path), tmp_path / "draft" / "checkpoints" / "step-000000004"
    ran: list[int] = []

    def units(lr: int, seed: int = 0) -> list[Unit]:
        def work() -> None:
            step.mkdir(parents=True, exist_ok=True)
            if not ran:
                ran.append(lr)
                raise KeyboardInterrupt
            (tmp_path / "draft" / "data").write_text("made")

        first = Unit("first", "", {"seed": seed}, (), (), lambda: ran.append(-1))
        return [first, Unit("distill", "", {"lr": lr}, ("first",), ("draft",), work, saved="draft/checkpoints")]

    with pytest.raises(KeyboardInterrupt):
        folder.run(units(1)[1])
    refusal = "interrupted at step 4 with another lr; restore the setting to continue it, or delete .*checkpoints"
    with pytest.raises(UserError, match=f"distill: {refusal}"):
        execute(units(2, seed=1), folder, lambda line: None)
    assert step.is_dir()
    assert ran == [1], "nothing ran before the refusal"
    assert schedule(units(2), folder)["distill"].startswith("refused: ")
    step.rmdir()
    execute(units(2), folder, lambda line: None)
    assert (tmp_path / "draft" / "data").exists()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("I/O: No space left on device (os error 28)"),
        OSError("5000 requested and 490 written"),  # numpy's
    ],
)
def test_a_full_disk_in_any_stage_is_one_line_and_the_stage_runs_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail() -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(bench, "work", lambda output: fail)
        with pytest.raises(UserError, match=r"first: .*(No space left on device|490 written).*; free some space"):
            bench.run()
    assert bench.run() == ALL


def test_several_ranks_train_together_and_do_nothing_else(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"first: one process does this .*run `draftsmith first` without accelerate"):
        bench.run()
    train = Unit("first", "", {}, (), ("first",), bench.work("first"), ranks=True)
    monkeypatch.setenv("RANK", "1")
    execute([train], bench.folder, lambda line: None)
    assert bench.folder.record("first") is None, "only the main rank writes records"
    monkeypatch.setenv("RANK", "0")
    execute([train], bench.folder, lambda line: None)
    assert bench.folder.record("first")
