"""How the stages hang together: what each unit depends on, with fake work in place of training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.cli import main
from draftsmith.config import load_config
from draftsmith.run import RunFolder, Unit, execute, schedule
from draftsmith.stages import stage_units
from draftsmith.work import Work

CONFIG = """
run_root: {root}/runs
data: {{sources: [{{kind: json, path: {root}/rows.jsonl}}]}}
eagle: {{a: {{rollouts: 1}}, b: {{rollouts: 2}}}}
evaluation: {{drafts: [untrained, distilled, a, b, oracle]}}
tracking: {{trackers: []}}
"""


class Bench:
    """A config whose stages only write one file each."""

    def __init__(self, root: Path) -> None:
        self.root, self.file = root, root / "exp.yaml"
        (root / "rows.jsonl").write_text('{"text": "one"}\n')
        self.file.write_text(CONFIG.format(root=root))

    def units(self, *overrides: str) -> list[Unit]:
        config = load_config(self.file, overrides).config
        self.run = config.run
        units = stage_units(config, Work(config, print))
        return [Unit(u.stage, u.name, u.settings, u.inputs, u.outputs, self.fake(u), u.resumes) for u in units]

    def fake(self, unit: Unit) -> Callable[[], None]:
        def write() -> None:
            for name in unit.outputs:
                place = self.run / name
                place = place if place.suffix else place / "data"
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text("made")

        return write

    def execute(self, *overrides: str) -> list[str]:
        units = self.units(*overrides)
        return execute(units, RunFolder(self.run), lambda line: None)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_every_unit_comes_after_its_inputs(bench: Bench) -> None:
    seen: set[str] = set()
    for unit in bench.units():
        assert set(unit.inputs) <= seen, unit.key
        seen.add(unit.key)
    assert {"target", "prepare", "cache", "distill", "train-eagle a", "eval-acceptance oracle", "report"} <= seen


def test_a_second_run_of_all_stages_runs_nothing(bench: Bench) -> None:
    assert bench.execute()[0] == "target"
    assert bench.execute() == []


EVALUATIONS = [f"eval-acceptance {name}" for name in ("untrained", "distilled", "a", "b", "oracle")]


@pytest.mark.parametrize(
    ("override", "runs"),
    [
        ("eagle.a.rollouts=3", ["train-eagle a", "eval-acceptance a", "tune", "report"]),
        ("distill.tokens=7", ["distill", "eval-acceptance untrained", "eval-acceptance distilled", "tune", "report"]),
        ("evaluation.K=2", [*EVALUATIONS, "tune", "report"]),
        ("tune.K=2", ["tune"]),
        ("evaluation.drafts=[a]", ["tune", "report"]),
        (
            "target.dtype=bfloat16",
            ["cache", "distill", "train-eagle a", "train-eagle b", *EVALUATIONS, "tune", "report"],
        ),
        ("cache.batch_tokens=9", []),
        ("tracking.project=other", []),
    ],
)
def test_a_changed_setting_runs_what_rests_on_it(bench: Bench, override: str, runs: list[str]) -> None:
    bench.execute()
    assert bench.execute(override) == runs


def test_a_changed_seed_trains_everything_again_but_prepares_no_other_rows(bench: Bench) -> None:
    bench.execute()
    changed = {key: why for key, why in schedule(bench.units("seed=1"), RunFolder(bench.run)).items() if "seed" in why}
    assert set(changed) == {"target", "distill", "train-eagle a", "train-eagle b"}


def test_a_cap_on_tokens_leaves_the_target_alone(bench: Bench) -> None:
    """The target learns from the whole corpus; a cap only shortens the rows that drafts are made from."""
    bench.execute()
    assert bench.execute("data.train_tokens={prose: 100}")[:2] == ["prepare", "cache"]


def test_another_content_of_a_data_file_makes_everything_again(bench: Bench) -> None:
    everything = bench.execute()
    (bench.root / "rows.jsonl").write_text('{"text": "two"}\n')
    assert bench.execute() == everything


def test_a_given_target_is_stamped_by_its_files(bench: Bench) -> None:
    model = bench.root / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"1")
    override = f"target.path={model}"
    bench.execute(override)
    assert bench.execute(override) == []
    (model / "model.safetensors").write_bytes(b"22")
    assert bench.execute(override)[0] == "target"


FAKES: dict[str, Callable[..., Any]] = {
    "train_target": lambda work: _touch(work.run / "target" / "model", work.run / "target-rows" / "rows"),
    "prepare": lambda work: _touch(work.run / "rows" / "rows"),
    "cache": lambda work: _touch(work.run / "cache" / "shard"),
    "distill": lambda work: _touch(work.run / "draft" / "weights"),
    "train_eagle": lambda work, name: _touch(work.run / "eagle" / name / "weights"),
    "evaluate": lambda work, draft: _touch(work.run / "eval" / f"{draft}.json", text='{"schema": 1, "results": []}'),
    "report": lambda work: _touch(work.run / "report.html", work.run / "plots" / "x.png"),
    "write_environment": lambda work: None,
}


def _touch(*places: Path, text: str = "made") -> None:
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


def test_demo_runs_every_stage_once_and_then_skips_every_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, fake in FAKES.items():
        monkeypatch.setattr(Work, name, fake)
    monkeypatch.setattr("draftsmith.cli._print_results", lambda run: None)

    def demo() -> str:
        with pytest.raises(SystemExit) as ended:
            main(["demo", f"run_root={tmp_path}"])
        assert ended.value.code == 0
        return capsys.readouterr().out

    first, second = demo(), demo()
    stages = ("target", "prepare", "cache", "distill", "train-eagle", "eval-acceptance", "report")
    assert all(f"\n{stage}" in f"\n{first}" for stage in stages)
    assert "skipped" not in first
    assert [line for line in second.splitlines() if "skipped" in line] == [f"{s}: unchanged, skipped" for s in stages]
    assert f"report: {tmp_path / 'demo' / 'report.html'}" in second


@pytest.mark.parametrize("command", ["demo", "eval-acceptance"])
def test_an_output_that_differs_from_plain_decoding_is_exit_code_1_after_the_results(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"domain": "code", "temperature": 0.0, "K": 5, "identical": [14, 16], "tokens_per_verify": 2.0}
    text = json.dumps({"schema": 1, "results": [entry]})
    fakes = FAKES | {"evaluate": lambda work, draft: _touch(work.run / "eval" / f"{draft}.json", text=text)}
    for name, fake in fakes.items():
        monkeypatch.setattr(Work, name, fake)
    file = tmp_path / "exp.yaml"
    file.write_text("evaluation: {drafts: [distilled]}\n")
    drafts = "evaluation.drafts=[distilled]"
    arguments = [command, *([str(file)] if command == "eval-acceptance" else []), f"run_root={tmp_path}", drafts]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "tracking.trackers=[]"])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "\nNOT EXACT: distilled differs from plain decoding on 2 of 16 prompts." in out
    assert ("\nreport: " in out) == (command == "demo")
