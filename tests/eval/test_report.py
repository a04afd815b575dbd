"""The report says what was measured: the verdict first, nothing from outside, nothing unescaped."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.eval.plots import depth_plots, tokens_plots
from draftsmith.eval.report import build_report, console_tables, exactness, load_curves, verdict
from draftsmith.eval.results import headline, left_out, load_results, measure


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes seconds; what the page says in words does not depend on it."""
    monkeypatch.setattr("draftsmith.eval.report._plots", lambda run, results: [])


def interval(value: float, margin: float = 0.05, count: int = 100) -> dict[str, Any]:
    return {"value": value, "low": value - margin, "high": value + margin, "count": count}


def entry(domain: str, tokens: float, gain: float | None = None, **changes: Any) -> dict[str, Any]:
    """One result; `gain` is its measured speed-up."""
    result = {
        "domain": domain,
        "temperature": 0.0,
        "K": 5,
        "tree": "chain",
        "prompts": 40,
        "verifies": 812,
        "identical": [40, 40],
        "alpha": interval(0.7),
        "tokens_per_verify": interval(tokens),
        "n_alpha": [interval(0.7 - 0.05 * k) for k in range(5)],
        "speedup": interval(gain, 0.02) if gain is not None else {},
    }
    return result | changes


def write(run: Path, **drafts: list[dict[str, Any]]) -> Path:
    """A run folder with these results; `_` in a name stands for `-`."""
    (run / "eval").mkdir(parents=True, exist_ok=True)
    for name, results in drafts.items():
        document = {"schema": 1, "draft": {"kind": "x", "path": None, "parameters": 5}, "results": results}
        (run / "eval" / f"{name.replace('_', '-')}.json").write_text(json.dumps(document))
    return run


def first_line(page: str) -> str:
    """The first text that a reader of the page sees."""
    body = page[page.index("<body>") :]
    return next(text.strip() for text in re.split(r"<[^>]*>", body) if text.strip())


def test_the_first_line_is_the_verdict_with_the_measured_numbers(tmp_path: Path, no_plots: None) -> None:
    write(tmp_path, eagle3=[entry("code", 2.42, 1.31), entry("chat", 2.1, 1.22)], distilled=[entry("code", 1.9, 1.5)])
    line = first_line(build_report(tmp_path).read_text())
    assert line == (
        "eagle3 emits 2.42 tokens per verify on code and 2.10 on chat at T = 0, K = 5: 1.22 to 1.31× the speed of plain decoding."
    )


@pytest.mark.parametrize(
    ("code", "chat", "start"),
    [
        (0.7, 0.8, "Slower than plain decoding: 0.70 to 0.80× its speed."),
        (1.3, 0.8, "Slower than plain decoding on chat: 0.80× its speed."),
        (1.3, 1.01, "Not clearly faster than plain decoding: 1.01 to 1.30× its speed"),
        (1.3, 1.2, "eagle3 emits"),
    ],
)
def test_slower_than_plain_decoding_is_said_first(
    tmp_path: Path, no_plots: None, code: float, chat: float, start: str
) -> None:
    write(tmp_path, eagle3=[entry("code", 2.4, code), entry("chat", 2.1, chat)])
    assert first_line(build_report(tmp_path).read_text()).startswith(start)


def test_slower_at_one_temperature_alone_is_said_first(tmp_path: Path, no_plots: None) -> None:
    hot = entry("code", 1.2, 0.6, temperature=1.5, identical=None)
    write(tmp_path, eagle3=[entry("code", 2.4, 1.4), hot])
    line = first_line(build_report(tmp_path).read_text())
    assert line.startswith("Slower than plain decoding on code at T = 1.5: 0.60× its speed. eagle3 emits 2.40")


def test_a_speed_that_was_not_measured_is_called_that(tmp_path: Path) -> None:
    write(tmp_path, eagle3=[entry("code", 2.4)])
    assert "speed against plain decoding was not measured" in verdict(load_results(tmp_path)).text


def test_the_headline_is_the_best_trained_draft_at_the_lowest_temperature_and_never_the_oracle(tmp_path: Path) -> None:
    cold = {"eagle3": [entry("code", 2.4)], "oracle": [entry("code", 6.0)], "distilled": [entry("code", 2.6)]}
    write(tmp_path, **cold)
    warm = [entry("code", 2.4), entry("code", 5.0, temperature=1.0)]
    write(tmp_path, eagle3=warm)
    assert [(result.draft, result.temperature) for result in headline(load_results(tmp_path))] == [("distilled", 0.0)]


def test_an_output_that_differs_from_plain_decoding_raises_an_alarm(tmp_path: Path, no_plots: None) -> None:
    write(tmp_path, eagle3=[entry("code", 2.4, identical=[39, 40]), entry("chat", 2.4)], oracle=[entry("code", 6.0)])
    page = build_report(tmp_path).read_text()
    assert exactness(load_results(tmp_path)) == [("eagle3", 79, 80), ("oracle", 40, 40)]
    assert "Some greedy outputs differ" in page
    assert "identical 79/80" in page
    write(tmp_path, eagle3=[entry("code", 2.4)])
    assert "Some greedy outputs differ" not in build_report(tmp_path).read_text()


def test_the_page_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    write(tmp_path, eagle3=[entry("code", 2.4)])
    page = build_report(tmp_path).read_text()
    loaded = re.findall(r"""(?:src|srcset|href)\s*=\s*["']([^"']*)""", page) + re.findall(r"url\(([^)]*)\)", page)
    assert loaded
    assert all(address.startswith("data:") for address in loaded)
    assert "<script" not in page
    assert "@import" not in page


def test_what_comes_from_files_is_escaped(tmp_path: Path, no_plots: None) -> None:
    evil = "<script>alert(1)</script>"
    write(tmp_path, eagle3=[entry(evil, 2.4)])
    (tmp_path / "resolved.yaml").write_text(f"name: {evil}\n")
    (tmp_path / "environment.json").write_text(json.dumps({"python": evil, "packages": {"torch": "2"}}))
    page = build_report(tmp_path).read_text()
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 4
    assert "packages torch" in page


def test_plots_are_written_beside_the_page_and_stale_ones_are_removed(tmp_path: Path) -> None:
    write(tmp_path, eagle3=[entry("code", 2.4)])
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "depth-gone.png").write_bytes(b"old")
    (tmp_path / "eagle" / "eagle3").mkdir(parents=True)
    lines = [json.dumps({"step": step, "loss": 2.0, "expected_acceptance": 0.5}) for step in (1, 2)]
    (tmp_path / "eagle" / "eagle3" / "training.jsonl").write_text("\n".join(lines))
    build_report(tmp_path)
    found = {path.stem for path in (tmp_path / "plots").glob("*.png")}
    assert found == {
        "depth-code-T0-K5", "tokens-per-verify-T0-K5", "training-drafts", "training-acceptance",
        "expected-tokens", "expected-speedup",
    }  # fmt: skip


def test_no_domain_or_tree_names_a_file_outside_the_folder_of_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith.eval.plots._draw", lambda name, title, draw: name)
    write(tmp_path, eagle3=[entry("../../x/y", 2.4), entry("code", 2.4, tree="../../z")])
    results = load_results(tmp_path)
    made = [str(name) for name in [*depth_plots(results), *tokens_plots(results)]]
    assert any(name.startswith("depth-.._.._x_y-") for name in made)
    assert not any("/" in name for name in made)


def test_a_half_written_last_line_of_a_training_log_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "training.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    [curve] = load_curves(tmp_path)
    assert (curve.name, curve.steps, curve.loss, curve.acceptance) == ("distilled", (1,), (2.0,), (None,))


def test_what_was_not_measured_is_a_dash_and_never_a_number(tmp_path: Path, no_plots: None) -> None:
    assert measure({}) is None
    assert measure(None) is None
    write(tmp_path, eagle3=[entry("code", 2.4, alpha={}, n_alpha=[{}, {}], identical=None)])
    [result] = load_results(tmp_path)
    assert (result.alpha, result.n_alpha, result.speedup, result.identical) == (None, (), None, None)
    assert "–" in build_report(tmp_path).read_text()
    assert console_tables([result])[0].row_count == 1


@pytest.mark.parametrize("text", ['{"schema": 1}', "[]", "not json", '{"schema": 1, "results": [{"domain": "code"}]}'])
def test_a_file_that_is_no_result_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "mine.json").write_text(text)
    with pytest.raises(UserError, match=r"mine\.json: not a result"):
        load_results(tmp_path)


def test_a_result_of_another_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "mine.json").write_text('{"schema": 2, "results": []}')
    with pytest.raises(UserError, match="schema 2"):
        load_results(tmp_path)


def test_the_same_files_give_the_same_page(tmp_path: Path) -> None:
    write(tmp_path, eagle3=[entry("code", 2.4)])
    assert build_report(tmp_path).read_bytes() == build_report(tmp_path).read_bytes()


def test_a_draft_that_the_config_no_longer_evaluates_is_left_out_and_named(tmp_path: Path) -> None:
    write(tmp_path, eagle3=[entry("code", 2.4)], gone=[entry("code", 9.0)])
    (tmp_path / "eval" / "broken.json").write_text("not json")
    (tmp_path / "resolved.yaml").write_text("evaluation: {drafts: [eagle3]}\n")
    assert {result.draft for result in load_results(tmp_path)} == {"eagle3"}
    assert left_out(tmp_path) == ["broken.json (not in evaluation.drafts)", "gone.json (not in evaluation.drafts)"]


def test_results_of_an_older_target_are_left_out_and_named(tmp_path: Path) -> None:
    write(tmp_path, distilled=[entry("code", 9.0)], eagle3=[entry("code", 2.4)], oracle=[entry("code", 6.0)])
    for seconds, (draft, target) in enumerate((("distilled", "old"), ("eagle3", "new"), ("oracle", "new"))):
        path = tmp_path / "eval" / f"{draft}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"target": {"fingerprint": target}}))
        os.utime(path, (seconds, seconds))
    assert [result.draft for result in load_results(tmp_path)] == ["eagle3", "oracle"]
    assert left_out(tmp_path) == ["distilled.json (of another target)"]


def test_an_output_that_differs_from_plain_decoding_is_said_before_any_speed(tmp_path: Path, no_plots: None) -> None:
    wrong = [entry("code", 1.9, 1.5, identical=[7, 8]), entry("chat", 1.9, 1.5, identical=[7, 8])]
    write(tmp_path, eagle3=[entry("code", 2.4, 1.3)], distilled=wrong, oracle=[entry("code", 6, identical=[39, 40])])
    judged = verdict(load_results(tmp_path))
    assert judged.tone == "inexact"
    assert first_line(build_report(tmp_path).read_text()) == judged.text
    start = "NOT EXACT: distilled differs from plain decoding on 2 of 16 prompts and oracle on 1 of 40. eagle3 emits"
    assert judged.text.startswith(start)


def test_a_sampled_output_need_not_equal_plain_greedy_decoding(tmp_path: Path) -> None:
    write(tmp_path, eagle3=[entry("code", 2.4, 1.3), entry("code", 2.0, 1.2, temperature=1.0, identical=[3, 40])])
    assert verdict(load_results(tmp_path)).tone == "faster"
